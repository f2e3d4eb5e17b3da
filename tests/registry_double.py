"""OCI registry in memory, with planned faults; what a real one does not do on request."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from http_replies import while_serving


@dataclass(frozen=True)
class Fault:
    """What one answer does wrong."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    cut_after: int | None = None
    """The connection ends after so many bytes of the body, sent or received."""


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    authorization: str | None
    span: str | None


Plan = Callable[[Seen], "Fault | None"]


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class RegistryDouble:
    """One repository for all names. `seen` holds the requests in order."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.uploads: set[str] = set()
        self.numbers = itertools.count()
        self.seen: list[Seen] = []
        self.plan: Plan = lambda _: None
        self.address = ""
        self.lock = threading.Lock()

    def add(
        self, data: bytes, media_type: str = "application/vnd.oci.image.layer.v1.tar"
    ) -> dict[str, Any]:
        """Keep a blob; returns its descriptor."""
        self.blobs[digest_of(data)] = data
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    def tag(self, name: str, layers: list[dict[str, Any]], **changes: Any) -> str:
        """Keep a manifest under a tag; returns its digest."""
        value = {
            "schemaVersion": 2,
            "config": self.add(b"{}", "application/vnd.oci.image.config.v1+json"),
            "layers": layers,
            **changes,
        }
        body = json.dumps(value).encode()
        self.manifests[name] = self.manifests[digest_of(body)] = body
        return digest_of(body)

    def asked(self, pattern: str) -> list[Seen]:
        """Requests whose method and path match."""
        return [one for one in self.seen if re.search(pattern, f"{one.method} {one.path}")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: RegistryDouble

    def handle_any(self) -> None:
        seen = Seen(
            self.command, self.path, self.headers.get("Authorization"), self.headers.get("Range")
        )
        registry = self.registry
        with registry.lock:
            registry.seen.append(seen)
            fault = registry.plan(seen) or Fault()
        length = int(self.headers.get("Content-Length") or 0)
        wanted = length if fault.cut_after is None or not length else fault.cut_after
        body = self.rfile.read(wanted)
        url = urlsplit(self.path)
        if wanted < length:
            self.close_connection = True
            self.connection.close()
        elif fault.status is not None:
            self._send(fault.status, fault.body or b"", fault.headers)
        elif self.command in ("GET", "HEAD"):
            self._send_content(url.path, fault)
        else:
            self._change(url.path, parse_qs(url.query), body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def _send_content(self, path: str, fault: Fault) -> None:
        name = path.rpartition("/")[2]
        known = self.registry.manifests if "/manifests/" in path else self.registry.blobs
        data = known.get(name)
        if data is None:
            self._send(404, b'{"errors": [{"code": "UNKNOWN", "message": "not here"}]}')
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        headers = {"ETag": f'"{name}"'} if "/blobs/" in path else {}
        if span is None:
            self._send(200, data, headers, fault.cut_after)
            return
        start, stop = int(span[1]), min(int(span[2]) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._send(206, data[start:stop], headers, fault.cut_after)

    def _change(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        registry, name = self.registry, path.rpartition("/")[2]
        if self.command == "POST":
            name = f"u{next(registry.numbers)}"
            registry.uploads.add(name)
            self._send(202, b"", {"Location": f"{path}{name}?state=1"})
        elif "/manifests/" in path:
            registry.manifests[name] = registry.manifests[digest_of(body)] = body
            self._send(201, b"")
        elif name not in registry.uploads:
            self._send(404, b"")
        else:
            registry.uploads.remove(name)
            good = query["digest"] == [digest_of(body)]
            if good:
                registry.blobs[digest_of(body)] = body
            self._send(201 if good else 400, b"")

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):  # the client has left, or we did
            self.close_connection = True

    def finish(self) -> None:
        with suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def running(registry: RegistryDouble) -> Iterator[RegistryDouble]:
    """The registry at its `address`, for as long as the context lasts."""
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    registry.address = f"127.0.0.1:{server.server_port}"
    with while_serving(server):
        yield registry
