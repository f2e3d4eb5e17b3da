"""A request to a server behind the front, and its response, passed on as it comes.

Every request has a connection of its own, which the server closes when it has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Receive, Scope, Send

from cog_triton import errors
from cog_triton.front.message import Forward, Headers, Refused, end_to_end

_MUCH = 256 << 10
_MAX_REVISED = 1 << 20
_EVENTS = b"text/event-stream"
_EVENT_END = b"\n\n"
_REQUEST = (
    b"%b %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


class UpstreamResponse(asyncio.Protocol):
    """Response to one request; it is read no faster than `read` is called.

    `whole` is whether it has come to its end, `left` whether the client has gone.
    """

    def __init__(self, request: bytes, *, head_only: bool = False) -> None:
        self._request = request
        self._head_only = head_only
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._size = 0
        self._arrived = asyncio.Event()
        self._ended = self._paused = False
        self.status = 0
        self.headers: Headers = []
        self.length: int | None = None
        self.chunked = self.whole = self.left = False

    @classmethod
    async def of(cls, port: int, request: bytes, *, head_only: bool = False) -> UpstreamResponse:
        """The response of 127.0.0.1:`port`; raises OSError where nobody listens."""
        loop = asyncio.get_running_loop()
        made = cls(request, head_only=head_only)
        await loop.create_connection(lambda: made, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
        self._arrived.set()
        if self._size > _MUCH and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        lasts_until_end = bool(self.status) and self.length is None and not self.chunked
        self.whole = self.whole or (lasts_until_end and error is None and not self._ended)
        self._ended = True
        self._arrived.set()

    def on_message_begin(self) -> None:
        if self._ended:
            raise ValueError("a second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) < 200:
            self.headers = []
            return
        self.status = status
        framing = dict(self.headers)
        self.chunked = b"transfer-encoding" in framing
        length = framing.get(b"content-length", b"")
        self.length = int(length) if length.isdigit() and not self.chunked else None
        if self._head_only:
            self.whole = self._ended = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if self.status:
            self.whole = self._ended = True

    async def head(self) -> bool:
        """Wait for the head; whether there is one."""
        while not (self.status or self._ended):
            self._arrived.clear()
            await self._arrived.wait()
        return bool(self.status)

    async def read(self) -> bytes:
        """What of the body has come since the last call; empty at the end."""
        while not (self._pieces or self._ended):
            self._arrived.clear()
            await self._arrived.wait()
        pieces, self._pieces, self._size = self._pieces, [], 0
        if self._paused and not self._ended:
            self._paused = False
            self._transport.resume_reading()
        return b"".join(pieces)

    async def body(self, most: float = float("inf")) -> bytes:
        """The whole body, or more than `most` bytes of a longer one."""
        found = bytearray()
        while len(found) <= most and (piece := await self.read()):
            found += piece
        return bytes(found)

    def abort(self) -> None:
        """Close the connection at once; what has not come does not come."""
        self._ended = True
        self._arrived.set()
        self._transport.abort()

    async def until_left(self, receive: Receive) -> None:
        """Abort once the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self.abort()


_unfinished: set[UpstreamResponse] = set()


def cut_all() -> None:
    """End every response that is passed on, as if its server had broken off."""
    for response in tuple(_unfinished):
        response.abort()


async def pass_on(forward: Forward, scope: Scope, receive: Receive, send: Send) -> None:
    """Have a request answered by the server behind.

    Raises:
        Refused: 503, the server did not answer; nothing was sent.
    """
    head_only, request = forward.method == "HEAD", forward.encoded()
    forward.body = b""  # need not be in memory until the answer ends
    response: UpstreamResponse | None = None
    leaving: asyncio.Future[None] | None = None
    try:
        with suppress(OSError):
            response = await UpstreamResponse.of(forward.port, request, head_only=head_only)
        del request
        if response is not None:
            _unfinished.add(response)
            leaving = asyncio.ensure_future(response.until_left(receive))
        if response is None or not await response.head():
            raise _unanswered()
        await _send(response, forward, scope, receive, send)
    except Refused:
        if response is None or not response.left:  # else nobody waits for it
            raise
    finally:
        if leaving is not None:
            leaving.cancel()
        if response is not None:
            _unfinished.discard(response)
            response.abort()
        forward.ended(response is not None and response.whole)


async def _send(
    response: UpstreamResponse, forward: Forward, scope: Scope, receive: Receive, send: Send
) -> None:
    status, length = response.status, response.length
    kinds = [value for name, value in response.headers if name == b"content-type"]
    streams = response.chunked and any(kind.startswith(_EVENTS) for kind in kinds)
    body = b""
    if forward.revise and not streams:
        body = await response.body(_MAX_REVISED)
        if len(body) <= _MAX_REVISED:
            if not response.whole:
                raise _unanswered()
            if revised := forward.revise(status, body):
                await revised(scope, receive, send)
                return
    headers = end_to_end(response.headers)
    if length is not None and status != HTTPStatus.NOT_MODIFIED:  # uvicorn would await the body
        headers.append((b"content-length", b"%d" % length))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    redact = forward.redact if status >= 400 else None
    edit = forward.edit if streams else None
    part: MutableMapping[str, Any] = {"type": "http.response.body", "more_body": True}
    tail = b""
    while body or (body := await response.read()):
        body = redact(body) if redact else body
        if body := edit(body) if edit else body:
            tail = (tail + body)[-len(_EVENT_END) :]
            await send({**part, "body": body})
            body = b""
    last = edit.end() if edit else b""
    if not response.whole:
        if not (streams and forward.cut and tail in (b"", _EVENT_END)):
            scope["connection"].abort()
            return
        last = forward.cut
    await send({"type": "http.response.body", "body": last})


def _unanswered() -> Refused:
    rule = "the server behind this port does not answer; try again"
    return Refused(503, errors.TritonUnavailable(rule))


async def ask(port: int, method: bytes, path: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of the response of 127.0.0.1:`port` to a request with the JSON `body`.

    Raises OSError where nobody listens, and ValueError if it is cut short.
    """
    response = await UpstreamResponse.of(port, _REQUEST % (method, path, len(body), body))
    try:
        answered = await response.body()
        if not response.whole:
            raise ValueError("the response was cut short")
        return response.status, answered
    finally:
        response.abort()
