"""HTTP server with range requests, a large generated file, and planned faults."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from http_replies import while_serving

_NO_LINGER = struct.pack("ii", 1, 0)
Span = tuple[int, int]


class Content:
    """`size` bytes that differ from place to place; equal for equal seeds."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self._block = random.Random(seed).randbytes(1_000_003)

    @classmethod
    def of(cls, data: bytes) -> Content:
        content = cls(len(data))
        content._block = data
        return content

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        view = memoryview(self._block)
        while start < stop:
            at = start % len(view)
            chunk = view[at : at + stop - start]
            yield chunk
            start += len(chunk)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.read(0, self.size):
            digest.update(chunk)
        return digest.hexdigest()

    def whole(self) -> bytes:
        return b"".join(self.read(0, self.size))


@dataclass(frozen=True)
class Fault:
    """What one answer does wrong."""

    status: int | None = None
    """This status instead of the file."""
    headers: dict[str, str] = field(default_factory=dict)
    """Over the right ones; an empty one is left out."""
    reset_after: int | None = None
    """A TCP reset after so many bytes of the body."""
    close_after: int | None = None
    """The end of the connection after so many bytes of the body."""
    ignore_range: bool = False
    shift: int = 0
    """The part begins so many bytes later than asked, as the header says."""
    shorten: int = 0
    """The part ends so many bytes earlier than asked, as the header says."""


Plan = Callable[[int, "Span | None"], "Fault | None"]


class FileServer:
    """The file at every path. `requests` holds the range of each request, None for the whole."""

    def __init__(self, content: Content, plan: Plan | None = None) -> None:
        self.content = content
        self.plan: Plan = plan or (lambda _number, _span: None)
        self.ranges = True
        self.with_length = True
        self.etag: str | None = '"one"'
        self.modified: str | None = None
        self.requests: list[Span | None] = []
        self.seen: list[BaseHTTPRequestHandler] = []
        self.url = ""
        self._lock = threading.Lock()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a GET."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        span = (int(match[1]), int(match[2]) + 1) if match else None
        with self._lock:
            number = len(self.requests)
            self.requests.append(span)
            self.seen.append(request)
        fault = self.plan(number, span) or Fault()
        if fault.status is not None:
            self._send(request, fault, fault.status, b"", {})
            return
        headers = {"ETag": self.etag or "", "Last-Modified": self.modified or ""}
        size = self.content.size
        start, stop, status = 0, size, 200
        if span is not None and self.ranges and not fault.ignore_range:
            start, stop, status = span[0] + fault.shift, min(span[1], size), 206
            stop = max(stop - fault.shorten, start)
            if start >= size:
                self._send(request, fault, 416, b"", {"Content-Range": f"bytes */{size}"})
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if self.with_length:
            headers["Content-Length"] = str(stop - start)
        self._send(request, fault, status, (start, stop), headers)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        fault: Fault,
        status: int,
        body: bytes | Span,
        headers: dict[str, str],
    ) -> None:
        request.send_response(status)
        if isinstance(body, bytes):
            headers = {"Content-Length": str(len(body)), **headers}
        for name, value in {**headers, **fault.headers}.items():
            if value:
                request.send_header(name, value)
        if "Content-Length" not in headers:
            request.close_connection = True
        request.end_headers()
        if isinstance(body, bytes):
            request.wfile.write(body)
            return
        sent = 0
        for chunk in self.content.read(*body):
            for limit, reset in ((fault.reset_after, True), (fault.close_after, False)):
                if limit is not None and sent + len(chunk) > limit:
                    request.wfile.write(chunk[: limit - sent])
                    self._end(request, reset)
                    return
            request.wfile.write(chunk)
            sent += len(chunk)
        if fault.close_after is not None:
            self._end(request, reset=False)

    @staticmethod
    def _end(request: BaseHTTPRequestHandler, reset: bool) -> None:
        request.wfile.flush()
        request.close_connection = True
        if reset:
            option = socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
            request.connection.setsockopt(*option)
            # Not the polite end that the handler would make.
            request.connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Callable[[BaseHTTPRequestHandler], None]

    def do_GET(self) -> None:
        try:
            type(self).answer(self)
        except (OSError, ValueError):  # the client has left, as it may, or we did
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def finish(self) -> None:
        with suppress(OSError, ValueError):  # already reset
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are nothing to tell."""

    def shutdown_request(self, request: object) -> None:
        with suppress(OSError):
            super().shutdown_request(request)  # type: ignore[arg-type]


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server that keeps connections and has `answer` answer every request."""
    handler = type("Handler", (_Handler,), {"answer": staticmethod(answer)})
    with while_serving(_Server(("127.0.0.1", 0), handler)) as url:
        yield url


@contextmanager
def serving_file(content: Content, plan: Plan | None = None) -> Iterator[FileServer]:
    """A `FileServer` for as long as the context lasts."""
    server = FileServer(content, plan)
    with answering(server.answer) as url:
        server.url = url
        yield server
