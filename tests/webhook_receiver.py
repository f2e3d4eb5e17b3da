"""A host that takes webhooks, by HTTP or HTTPS, and notes what came when."""

import atexit
import json
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

import pytest

CERTIFICATE = Path(tempfile.mkdtemp(prefix="certificate-")) / "localhost.pem"
"""Of localhost, hooks.example.com and 127.0.0.1, with its key; its own authority."""
if openssl := shutil.which("openssl"):
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", "subjectAltName=DNS:localhost,DNS:hooks.example.com,IP:127.0.0.1"),
            *("-keyout", "key.pem", "-out", "certificate.pem"),
        ],
        cwd=CERTIFICATE.parent,
        check=True,
        capture_output=True,
    )
    parts = ((CERTIFICATE.parent / name).read_bytes() for name in ("certificate.pem", "key.pem"))
    CERTIFICATE.write_bytes(b"".join(parts))
needs_tls = pytest.mark.skipif(openssl is None, reason="no openssl, which makes certificates")
by_http_and_https = pytest.mark.parametrize("tls", [False, pytest.param(True, marks=needs_tls)])
atexit.register(shutil.rmtree, CERTIFICATE.parent, ignore_errors=True)


class Receiver:
    """`answer` has the status and headers of an answer, by path and count of earlier requests.

    A status of 0 is a connection that ends without an answer. `sequential` takes one at a time.
    """

    def __init__(
        self,
        answer: Callable[[str, int], tuple[int, dict[str, str]]] = lambda _path, _count: (200, {}),
        *,
        tls: bool = False,
        sequential: bool = False,
    ) -> None:
        self.times: list[float] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.events: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.times.append(time.monotonic())
                receiver.paths.append(self.path)
                receiver.headers.append({name.lower(): self.headers[name] for name in self.headers})
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.events.append(json.loads(body))
                status, headers = answer(self.path, len(receiver.events) - 1)
                if not status:
                    return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        kind = HTTPServer if sequential else ThreadingHTTPServer
        self._server = kind(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.request_queue_size = 512
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._server.server_bind()
        self._server.server_activate()
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.scheme = "https" if tls else "http"
        self.url = f"{self.scheme}://127.0.0.1:{self.port}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of(self, prediction: str) -> list[tuple[float, dict[str, Any]]]:
        """When the webhooks of one prediction came, and what they said."""
        return [
            (when, event)
            for when, event in zip(self.times, self.events, strict=False)
            if event["id"] == prediction
        ]
