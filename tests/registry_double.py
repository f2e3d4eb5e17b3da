"""OCI registry in memory, with planned faults; what a real one does not do on request."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from http_replies import reply
from range_server import answering


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

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer any request, with the fault that is planned for it."""
        span = request.headers.get("Range")
        seen = Seen(request.command, request.path, request.headers.get("Authorization"), span)
        with self.lock:
            self.seen.append(seen)
            fault = self.plan(seen) or Fault()
        length = int(request.headers.get("Content-Length") or 0)
        wanted = length if fault.cut_after is None or not length else fault.cut_after
        body = request.rfile.read(wanted)
        url = urlsplit(request.path)
        if wanted < length:
            request.close_connection = True
            request.connection.close()
        elif fault.status is not None:
            reply(request, fault.status, fault.body or b"", **fault.headers)
        elif request.command in ("GET", "HEAD"):
            self._send_content(request, url.path, fault.cut_after)
        else:
            self._change(request, url.path, parse_qs(url.query), body)

    def _send_content(self, request: BaseHTTPRequestHandler, path: str, cut: int | None) -> None:
        name = path.rpartition("/")[2]
        data = (self.manifests if "/manifests/" in path else self.blobs).get(name)
        if data is None:
            reply(request, 404, b'{"errors": [{"code": "UNKNOWN", "message": "not here"}]}')
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        headers, status = {"ETag": f'"{name}"'} if "/blobs/" in path else {}, 200
        if span is not None:
            start, stop = int(span[1]), min(int(span[2]) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        headers["Content-Length"] = str(len(data))
        request.close_connection |= cut is not None
        reply(request, status, data if cut is None else data[:cut], **headers)

    def _change(
        self, request: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]], body: bytes
    ) -> None:
        name = path.rpartition("/")[2]
        if request.command == "POST":
            name = f"u{next(self.numbers)}"
            self.uploads.add(name)
            reply(request, 202, Location=f"{path}{name}?state=1")
        elif "/manifests/" in path:
            self.manifests[name] = self.manifests[digest_of(body)] = body
            reply(request, 201)
        elif name not in self.uploads:
            reply(request, 404)
        else:
            self.uploads.remove(name)
            good = query["digest"] == [digest_of(body)]
            if good:
                self.blobs[digest_of(body)] = body
            reply(request, 201 if good else 400)


@contextmanager
def running(registry: RegistryDouble) -> Iterator[RegistryDouble]:
    """The registry at its `address`, for as long as the context lasts."""
    with answering(registry.answer) as url:
        registry.address = url.removeprefix("http://")
        yield registry
