"""Blocking HTTP request to Triton and its streamed response, for a thread of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

from cog_triton.triton.http_exchange import ExchangeBroken, ResponseParser, request_bytes

_READ_SIZE = 65536


class StreamTimeout(Exception):
    """Nothing arrived within the timeout."""


class HTTPStream:
    """One POST request and its streamed response; leaving the context closes the connection."""

    def __init__(self, host: str, port: int, path: str, body: bytes, timeout: float) -> None:
        """`timeout` is in seconds, for connecting and between reads."""
        self._address = (host, port)
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._request = request_bytes(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}", path, body
        )
        self.timeout = timeout
        self._parser = ResponseParser()
        self._socket: socket.socket | None = None
        self._aborted = False

    def __enter__(self) -> Self:
        """Send the request."""
        try:
            self._socket = own = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError as error:  # no file descriptor is left
            raise ExchangeBroken(f"cannot connect to {self._address}: {error}") from error
        try:
            own.settimeout(self.timeout)
            try:
                own.connect(self._address)
            except OSError as error:
                raise ExchangeBroken(f"cannot connect to {self._address}: {error}") from error
            if self._aborted:
                raise ExchangeBroken("hung up before the request was sent")
            try:
                own.sendall(self._request)
            except OSError as error:
                raise ExchangeBroken(f"the request could not be sent: {error}") from error
        except BaseException:  # __exit__ is not called then
            own.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    @property
    def status(self) -> int:
        """The HTTP status; 0 before the response's head has arrived."""
        return self._parser.status

    @property
    def body(self) -> bytes:
        """See `ResponseParser.body`."""
        return self._parser.body

    def payloads(self) -> Iterator[list[bytes]]:
        """Data fields of events, as they arrive; raises StreamTimeout or ExchangeBroken."""
        while not self._parser.complete:
            payloads = self._parser.feed(self._read())
            if payloads:
                yield payloads

    def abort(self) -> None:
        """Close the connection, from any thread; its reader gets ExchangeBroken."""
        self._aborted = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> bytes:
        assert self._socket is not None
        try:
            return self._socket.recv(_READ_SIZE)
        except TimeoutError as error:
            raise StreamTimeout(f"nothing arrived for {self.timeout:g} s") from error
        except OSError as error:
            raise ExchangeBroken(f"the connection ended early: {error}") from error
