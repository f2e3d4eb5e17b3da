"""A streamed HTTP POST for the hot path: bytes go from the socket to the parser, no layers.

httpx costs about 100 us of CPU for each network read; a stream of tokens is nothing but
small reads. Parsing is httptools' (llhttp); one connection serves one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httptools


class StreamTimeout(Exception):
    """Nothing arrived for too long."""


class StreamBroken(Exception):
    """The connection could not be made, or ended in the middle of a response."""


class HTTPStream(asyncio.Protocol):
    """One POST and its response. Use as an async context manager; leaving it hangs up."""

    def __init__(self, host: str, port: int, path: str, body: bytes, timeout: float) -> None:
        """`timeout` is in seconds, for connecting and between reads."""
        self._address = (host, port)
        name = f"[{host}]" if ":" in host else host
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._complete = False
        self._error: Exception | None = None
        self.status = 0
        self.is_event_stream = False

    async def __aenter__(self) -> HTTPStream:
        """Send the request and wait for the response's head."""
        connecting = self._loop.create_connection(lambda: self, *self._address)
        try:
            await asyncio.wait_for(connecting, self._timeout)
        except (asyncio.TimeoutError, OSError) as error:
            raise StreamBroken(f"cannot connect to {self._address}: {error}") from error
        try:
            while not (self.status or self._error):
                await self._more()
            if self._error and not self.status:
                raise self._error
        except BaseException:  # __aexit__ is not called then
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body, as it arrives; raises StreamTimeout or StreamBroken."""
        while True:
            if self._chunks:
                arrived, self._chunks = self._chunks, []
                yield arrived[0] if len(arrived) == 1 else b"".join(arrived)
            elif self._complete:
                return
            elif self._error:
                raise self._error
            else:
                await self._more()

    async def _more(self) -> None:
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._timeout, self._expire)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _expire(self) -> None:
        self._fail(StreamTimeout(f"nothing arrived for {self._timeout:g} s"))

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(StreamBroken(f"not HTTP: {error}"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._complete:
            self._fail(StreamBroken(f"the connection ended early: {exc or 'closed'}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.is_event_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
