"""HTTP/1.1 client of the load generator: one time stamp for each read of the socket.

Parsed by httptools (llhttp), with keep-alive. A client that spends 100 us on each read, as general
ones do, would measure itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from cog_triton.errors import InvalidArgument
from cog_triton.system.redaction import redact_address

now = time.monotonic
_IDLE_S = 2.0
"""Servers close idle connections, some after 5 s; a request must not meet that."""


class TransportError(Exception):
    """Request without a complete answer; `kind` is a short name of the cause."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(detail)


class BufferedResponse:
    """Receives an answer as it arrives, and buffers the whole of it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.text = b""

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Receive status and headers; header names are in lower case."""
        self.status, self.headers = status, headers

    def body(self, data: bytes, at: float) -> None:
        """Receive a part of the body, read at `at` (by `now`)."""
        self.text += data


@dataclass(frozen=True, slots=True)
class Origin:
    """Host, port and scheme that a connection is for."""

    host: str
    port: int
    tls: bool

    @property
    def name(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def split_url(url: str) -> tuple[Origin, str]:
    """Split `url` into origin and path; raises E1005 unless it is an http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise InvalidArgument(
            f"--url={redact_address(url)!r}: must be http(s)://HOST[:PORT][/PATH]"
        )
    tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Origin(parts.hostname, port or (443 if tls else 80), tls), path


def encode_request(
    method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[Origin, bytes]:
    """Encode a request; returns where to send it, and its bytes."""
    origin, path = split_url(url)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {origin.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return origin, ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


class Connection(asyncio.Protocol):
    """HTTP connection with one request on it at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sink: BufferedResponse | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._at = 0.0
        self._headed = False
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether it is open and not idle for too long."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and now() - self.idle_since < _IDLE_S

    async def exchange(self, request: bytes, sink: BufferedResponse, timeout: float) -> None:
        """Send `request` and feed `sink` until the answer ends; raises TransportError."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._sink, self._done, self._headed = sink, loop.create_future(), False
        late = TransportError("timeout", f"no complete answer within {timeout:g} s")
        timer = loop.call_later(timeout, self._fail, late)
        try:
            self._transport.write(request)
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            timer.cancel()
            self._sink = None
        self.idle_since = now()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._at = now()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(TransportError("not HTTP", f"the answer is not HTTP: {error}"))
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._headed and not {b"content-length", b"transfer-encoding"} & self._headers.keys():
            self._finish()
        else:
            why = f"before the answer's end: {exc or 'closed'}"
            self._fail(TransportError("connection closed", why))

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._headed = True
        if self._sink is not None:
            self._sink.begin(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._flush()
        self._finish()

    def _flush(self) -> None:
        """Pass on the body of one read in one piece, whatever HTTP chunks it had."""
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            if self._sink is not None:
                self._sink.body(data, self._at)

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: TransportError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class Client:
    """HTTP client with a pool of keep-alive connections."""

    def __init__(self, timeout: float) -> None:
        """`timeout` is in seconds, for a whole answer."""
        self.timeout = timeout
        self._idle: dict[Origin, list[Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def send(self, origin: Origin, request: bytes, sink: BufferedResponse) -> None:
        """Send a request and feed `sink` its answer; raises TransportError."""
        connection = await self._connection(origin)
        await connection.exchange(request, sink, self.timeout)
        self._idle.setdefault(origin, []).append(connection)

    async def fetch(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> BufferedResponse:
        """Send a request and buffer its answer; raises TransportError."""
        sink = BufferedResponse()
        await self.send(*encode_request(method, url, headers, body), sink)
        return sink

    def close(self) -> None:
        """Close every idle connection."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _connection(self, origin: Origin) -> Connection:
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
            connection.close()
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(self.timeout, 30)):
                _, made = await loop.create_connection(
                    Connection, origin.host, origin.port, ssl=self._tls if origin.tls else None
                )
        except (TimeoutError, OSError) as error:
            where = f"{origin.host}:{origin.port}"
            raise TransportError("cannot connect", f"{where}: {error or 'no answer'}") from error
        return made
