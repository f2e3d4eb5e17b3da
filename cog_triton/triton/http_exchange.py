"""HTTP exchange with Triton, sans IO: the bytes of a request, and a parser of its response.

httpx costs about 100 us of CPU a network read; httptools (llhttp) a few. Whoever reads the socket
feeds what arrived: `triton_connections` reads all sockets on one thread.
"""

from __future__ import annotations

import httptools

from cog_triton.text.sse import EventSplitter, event_data


class ExchangeBroken(Exception):
    """The response is not HTTP, or has ended in the middle."""


def request_bytes(authority: str, path: str, body: bytes, *, keep: bool = False) -> bytes:
    """A POST request of JSON to ``host:port``; `keep` leaves the connection open afterwards."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {authority}\r\n"
        f"Connection: {'keep-alive' if keep else 'close'}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class ResponseParser:
    """Parser of one response: server-sent events, or a body; a new one for each request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._splitter: EventSplitter | None = None
        self._payloads: list[bytes] = []
        self._body: list[bytes] = []
        self.status = 0
        """0 until the headers are complete."""
        self.complete = False
        self.reusable = False
        """Whether the connection may carry another request after this response."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data fields of the events that `data` completes.

        Raises ExchangeBroken for what is not HTTP, and for b"", the connection's end, unless the
        response is complete.
        """
        if not data and not self.complete:
            raise ExchangeBroken("the connection ended early: closed")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ExchangeBroken(f"not HTTP: {error}") from error
        payloads, self._payloads = self._payloads, []
        return payloads

    @property
    def body(self) -> bytes:
        """A body that is no event stream, as far as it has arrived; else an incomplete event."""
        return self._splitter.rest if self._splitter else b"".join(self._body)

    def on_header(self, name: bytes, value: bytes) -> None:
        """For httptools."""
        if name.lower() == b"content-type" and value.startswith(b"text/event-stream"):
            self._splitter = EventSplitter()

    def on_headers_complete(self) -> None:
        """For httptools."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """For httptools."""
        if self._splitter is None:
            self._body.append(body)
            return
        for event in self._splitter.feed(body):
            if payload := event_data(event):
                self._payloads.append(payload)

    def on_message_complete(self) -> None:
        """For httptools."""
        self.reusable = self._parser.should_keep_alive()
        self.complete = True
