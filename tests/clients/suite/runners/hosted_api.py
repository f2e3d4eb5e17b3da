"""Replicate's hosted API before Cog's, as httpx's transport: what the platform does between them.

The client's paths, bodies and headers are mapped to Cog's HTTP API, and Cog's answers and webhooks
go back with what only the platform knows: model, version, urls.
"""

from __future__ import annotations

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_KNOWN = {"model": "me/small", "version": "0" * 64, "urls": {}, "logs": "", "metrics": {}}


class HostedAPI(httpx.BaseTransport):
    """Predictions of a Cog server at `url`; `requests` are (method, path) as Cog got them."""

    def __init__(self, url: str) -> None:
        self._cog = httpx.Client(base_url=url, timeout=120)
        self._states: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        states = self._states

        class Webhooks(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                states[self.path[1:]].update(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._webhooks = ThreadingHTTPServer(("127.0.0.1", 0), Webhooks)
        threading.Thread(target=self._webhooks.serve_forever, daemon=True).start()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        parts = request.url.path.split("/")
        if request.method == "POST" and parts[-1] == "predictions":
            return self._create(json.loads(request.read()), request.headers.get("Prefer", ""))
        if request.method == "POST" and parts[-1] == "cancel":
            answer = self._ask("POST", f"/predictions/{parts[-2]}/cancel")
            return httpx.Response(answer.status_code, json=self._states[parts[-2]])
        if request.method == "GET" and parts[-2] == "predictions":
            return httpx.Response(200, json=self._states[parts[-1]])
        return httpx.Response(404, json={"detail": f"{request.method} {request.url.path}"})

    def _create(self, body: dict[str, Any], prefer: str) -> httpx.Response:
        name = uuid.uuid4().hex
        self._states[name] = {**_KNOWN, "id": name, "status": "starting", "input": body["input"]}
        if prefer.startswith("wait"):
            answer = self._ask("POST", "/predictions", {"id": name, "input": body["input"]})
        else:
            webhook = f"http://127.0.0.1:{self._webhooks.server_port}/{name}"
            asked = {
                "input": body["input"],
                "webhook": webhook,
                "webhook_events_filter": body.get(
                    "webhook_events_filter", ["start", "output", "completed"]
                ),
            }
            headers = {"Prefer": "respond-async"}
            answer = self._ask("PUT", f"/predictions/{name}", asked, headers)
        found = answer.json()
        if answer.is_error:
            return httpx.Response(answer.status_code, json=found)
        if prefer.startswith("wait"):  # of the others, what webhooks told meanwhile is newer
            self._states[name].update(found)
        return httpx.Response(201, json=self._states[name])

    def _ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        self.requests.append((method, path))
        return self._cog.request(method, path, json=body, headers=headers)
