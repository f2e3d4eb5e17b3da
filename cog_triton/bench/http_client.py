"""HTTP/1.1 for a load generator: one read of the socket, one time stamp, no layers between.

httptools (llhttp) parses; connections are kept and used again. A client that spends 100 us on each
read, as the general ones do, measures itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from cog_triton.errors import InvalidArgument

now = time.monotonic
_IDLE_S = 2.0
"""Servers close idle connections, some after 5 s; a request must not meet that."""


class WireError(Exception):
    """A request that got no complete answer; `kind` is short and the same for the same cause."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(detail)


class Sink(Protocol):
    """Takes an answer as it arrives."""

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The head; names of headers are in lower case."""
        ...

    def body(self, data: bytes, at: float) -> None:
        """A part of the body, and when it was read, by `now`."""
        ...


class Whole:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.text = b""

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `Sink.begin`."""
        self.status, self.headers = status, headers

    def body(self, data: bytes, at: float) -> None:
        """See `Sink.body`."""
        self.text += data


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go."""

    host: str
    port: int
    tls: bool

    @property
    def name(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def split(url: str) -> tuple[Origin, str]:
    """Origin and path of `url`; raises E1005 for what is no http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise InvalidArgument(f"--url={url!r}: must be http(s)://HOST[:PORT][/PATH]")
    tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Origin(parts.hostname, port or (443 if tls else 80), tls), path


def encode(
    method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[Origin, bytes]:
    """The bytes of a request, and where to send them."""
    origin, path = split(url)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {origin.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return origin, ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


class Connection(asyncio.Protocol):
    """One connection, with one request on it at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._at = 0.0
        self._headed = False
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent on it."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and now() - self.idle_since < _IDLE_S

    async def exchange(self, request: bytes, sink: Sink, timeout: float) -> None:
        """Send `request` and feed `sink` until the answer ends; raises WireError."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._sink, self._done, self._headed = sink, loop.create_future(), False
        timer = loop.call_later(
            timeout, self._fail, WireError("timeout", f"no complete answer within {timeout:g} s")
        )
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
        """asyncio's: the connection is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's: bytes came."""
        self._at = now()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(WireError("not HTTP", f"the answer is not HTTP: {error}"))
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the connection ended, which ends a body without a length, too."""
        if self._headed and not {b"content-length", b"transfer-encoding"} & self._headers.keys():
            self._finish()
        else:
            self._fail(
                WireError("connection closed", f"before the answer's end: {exc or 'closed'}")
            )

    def on_message_begin(self) -> None:
        """httptools': an answer begins."""
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools': one header."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """httptools': the head is there."""
        self._headed = True
        if self._sink is not None:
            self._sink.begin(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        """httptools': a part of the body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """httptools': the answer ended."""
        if not self._parser.should_keep_alive():
            self.close()
        self._flush()
        self._finish()

    def _flush(self) -> None:
        """Hand on what one read brought, as one: a chunk of HTTP's coding means nothing."""
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            if self._sink is not None:
                self._sink.body(data, self._at)

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: WireError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class Client:
    """Sends requests, and keeps connections for the next ones."""

    def __init__(self, timeout: float) -> None:
        """`timeout` is in seconds, for a whole answer."""
        self.timeout = timeout
        self._idle: dict[Origin, list[Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def send(self, origin: Origin, request: bytes, sink: Sink) -> None:
        """One request and its answer; raises WireError."""
        connection = await self._connection(origin)
        await connection.exchange(request, sink, self.timeout)
        self._idle.setdefault(origin, []).append(connection)

    async def fetch(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Whole:
        """One request and its whole answer; raises WireError."""
        sink = Whole()
        await self.send(*encode(method, url, headers, body), sink)
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
            _, made = await asyncio.wait_for(
                loop.create_connection(
                    Connection, origin.host, origin.port, ssl=self._tls if origin.tls else None
                ),
                min(self.timeout, 30),
            )
        except (OSError, asyncio.TimeoutError) as error:
            raise WireError(
                "cannot connect", f"{origin.host}:{origin.port}: {error or 'no answer'}"
            ) from error
        return made
