"""Streaming HTTP client for the hot path: socket reads passed straight to httptools (llhttp).

httpx costs about 100 us of CPU a network read, and a token stream consists of small reads. Reads
block, where each prediction has its own thread, or pause, where an event loop waits for all.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import httptools
from typing_extensions import Self

_READ_SIZE = 65536


class StreamTimeout(Exception):
    """Nothing arrived within the timeout."""


class StreamBroken(Exception):
    """The connection failed, or ended in the middle of a response."""


class HTTPStream:
    """One POST request and its streamed response; leaving the context closes the connection."""

    def __init__(self, host: str, port: int, path: str, body: bytes, timeout: float) -> None:
        """`timeout` is in seconds, for connecting and between reads."""
        name = f"[{host}]" if ":" in host else host
        self._address = (host, port)
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.timeout = timeout
        self.pauses = False
        """Whether `head` and `chunks` yield b"" where they would wait."""
        self._expired = False
        self._parser = httptools.HttpResponseParser(self)
        self._socket: socket.socket | None = None
        self._aborted = False
        self._chunks: list[bytes] = []
        self._complete = False
        self.status = 0
        self.is_event_stream = False

    def __enter__(self) -> Self:
        """Send the request."""
        self._socket = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            self._connect()
            if self._aborted:
                raise StreamBroken("hung up before the request was sent")
            self._send()
        except BaseException:  # __exit__ is not called then
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def head(self) -> Iterator[bytes]:
        """Read until `status` and `is_event_stream` are known; yields only pauses, see `chunks`."""
        while not self.status:
            yield from self._pause()
            self._read()

    def chunks(self) -> Iterator[bytes]:
        """The body as it arrives; raises StreamTimeout or StreamBroken.

        If it `pauses`, continue after a b"" when `fileno` is readable, or after `expire`.
        """
        while True:
            if self._chunks:
                arrived, self._chunks = self._chunks, []
                yield arrived[0] if len(arrived) == 1 else b"".join(arrived)
            elif self._complete:
                return
            else:
                yield from self._pause()
                self._read()

    def fileno(self) -> int:
        """The socket's file descriptor; only while it is open."""
        assert self._socket is not None
        return self._socket.fileno()

    def expire(self) -> None:
        """Make a paused `chunks` raise StreamTimeout."""
        self._expired = True

    def abort(self) -> None:
        """Close the connection, from any thread; its reader gets StreamBroken."""
        self._aborted = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _pause(self) -> Iterator[bytes]:
        if self.pauses:
            assert self._socket is not None
            self._socket.setblocking(False)
            yield b""

    def _connect(self) -> None:
        assert self._socket is not None
        self._socket.settimeout(self.timeout)
        try:
            self._socket.connect(self._address)
        except OSError as error:
            raise StreamBroken(f"cannot connect to {self._address}: {error}") from error

    def _send(self) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(self._request)
        except OSError as error:
            raise StreamBroken(f"the request could not be sent: {error}") from error

    def _read(self) -> None:
        assert self._socket is not None
        if self._expired:
            raise StreamTimeout(f"nothing arrived for {self.timeout:g} s")
        try:
            data = self._socket.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except TimeoutError as error:
            raise StreamTimeout(f"nothing arrived for {self.timeout:g} s") from error
        except OSError as error:
            raise StreamBroken(f"the connection ended early: {error}") from error
        if not data:
            raise StreamBroken("the connection ended early: closed")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise StreamBroken(f"not HTTP: {error}") from error

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.is_event_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
