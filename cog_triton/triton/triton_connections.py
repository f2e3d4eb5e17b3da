"""Connections to Triton: one thread reads all sockets, so that no request needs its own.

Connections are kept for later requests: a new one costs a request a round trip and Triton a thread
hand-over. httpx costs about 100 us of CPU a network read; httptools (llhttp) a few.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from cog_triton.errors import TritonUnavailable
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


_log = logging.getLogger(__name__)

TICK_S = 0.1
_READ_SIZE = 1 << 18
_MAX_KEPT = 128
_EVENTS = select.EPOLLIN


class Receiver(Protocol):
    """Callbacks for one request, on the reader's thread; they must not block."""

    def on_payloads(self, payloads: list[bytes]) -> None:
        """Data fields of events that have arrived."""

    def on_end(self, status: int, body: bytes) -> None:
        """The response is complete; `body` is empty after a stream of whole events."""

    def on_failure(self, error: TritonUnavailable) -> None:
        """The connection failed, or was aborted."""


class Exchange:
    """One request that was sent; `abort` ends it."""

    def __init__(self, request: bytes, receiver: Receiver) -> None:
        self.request = request
        self.receiver = receiver
        self.parser = ResponseParser()
        self.connection: _Connection | None = None
        self.aborted = False

    def abort(self) -> None:
        """Close the connection, from any thread; `on_failure` follows, unless it has ended."""
        self.aborted = True
        if self.connection is not None and self.connection.exchange is self:
            self.connection.shut_down()


class _Connection:
    """A socket that is registered with the reader's epoll until the reader closes it."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self.fileno = own.fileno()
        self.exchange: Exchange | None = None
        self.unsent = b""
        self.used = False
        """Whether it has carried a whole exchange."""

    def shut_down(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class TritonConnections:
    """Non-blocking HTTP client of one Triton; `send` is thread-safe."""

    def __init__(self, url: str, on_tick: Callable[[float], None] = lambda now: None) -> None:
        """`on_tick` is called on the reader's thread every `TICK_S`, with time.monotonic()."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        self._address = (host, port)
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._on_tick = on_tick
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, path: str, body: bytes, receiver: Receiver, *, keep: bool = False) -> Exchange:
        """Send a request without waiting; `receiver` gets the response, or the failure.

        With `keep` the connection may be one that an earlier request left, and is left for later
        ones.
        """
        exchange = Exchange(request_bytes(self._authority, path, body, keep=keep), receiver)
        self._start()
        self._carry(exchange, reuse=keep)
        return exchange

    def close(self) -> None:
        """Close all connections; requests that run fail."""
        with self._lock:
            self._closing = True
            left = list(self._open.values())
        for connection in left:
            connection.shut_down()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(
                    target=self._read_all, name="triton-reader", daemon=True
                )
                self._thread.start()

    def _carry(self, exchange: Exchange, *, reuse: bool) -> None:
        connection = None
        with self._lock:
            if self._closing:
                raise _stopping()
            if reuse and self._idle:
                connection = self._idle.pop()
                # Under the lock: the reader may find it closed, and repeat the exchange.
                connection.exchange, exchange.connection = exchange, connection
        fresh = connection is None
        if connection is None:
            connection = exchange.connection = self._connect(exchange)
        try:
            sent = connection.socket.send(exchange.request)
        except (BlockingIOError, OSError):  # not connected yet; of a failure, the reader hears
            sent = 0
        rest = exchange.request[sent:]
        if rest:  # else the response may have come, and the connection be another request's
            connection.unsent = rest
        flags = _EVENTS | select.EPOLLOUT if rest else _EVENTS
        with self._lock:
            if fresh and self._closing:
                connection.socket.close()
                raise _stopping()
            if fresh:
                self._open[connection.fileno] = connection
                self._epoll.register(connection.fileno, flags)
            elif rest and self._open.get(connection.fileno) is connection:
                self._epoll.modify(connection.fileno, flags)
            # else the reader has closed it, and fails or repeats the exchange
        if exchange.aborted:
            connection.shut_down()

    def _connect(self, exchange: Exchange) -> _Connection:
        try:
            own = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError as error:  # no file descriptor is left
            raise TritonUnavailable(f"cannot connect to Triton: {error}; try again") from error
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        failed = own.connect_ex(self._address)
        if failed not in (0, errno.EINPROGRESS):
            own.close()
            raise TritonUnavailable(
                f"cannot connect to {self._address}: {os.strerror(failed)}; try again"
            )
        connection = _Connection(own)
        connection.exchange = exchange
        return connection

    def _read_all(self) -> None:
        next_tick = time.monotonic() + TICK_S
        while not (self._closing and not self._open):
            events = self._epoll.poll(max(next_tick - time.monotonic(), 0))
            for number, flags in events:
                connection = self._open[number]
                try:
                    self._serve(connection, flags)
                except Exception:  # noqa: BLE001 - the thread serves all other requests, too
                    _log.exception("a response of Triton could not be handled")
                    with suppress(Exception):
                        self._fail(connection, "its response could not be handled")
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                try:
                    self._on_tick(now)
                except Exception:  # noqa: BLE001 - as above
                    _log.exception("the periodic check of Triton's requests failed")
        self._epoll.close()

    def _serve(self, connection: _Connection, flags: int) -> None:
        if connection.unsent and flags & select.EPOLLOUT:
            self._write(connection)
        if not flags & ~select.EPOLLOUT:
            return
        try:
            data = connection.socket.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(connection, f"the connection ended early: {error}")
            return
        exchange = connection.exchange
        if exchange is None:  # an idle one: closed, or not HTTP
            self._fail(connection, "closed")
            return
        parser = exchange.parser
        try:
            payloads = parser.feed(data)
        except ExchangeBroken as error:
            self._fail(connection, str(error))
            return
        if payloads:
            exchange.receiver.on_payloads(payloads)
        if parser.complete:
            self._release(connection)
            exchange.receiver.on_end(parser.status, parser.body)

    def _write(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            return
        except OSError:  # reading tells the reason
            connection.unsent = b""
        else:
            connection.unsent = connection.unsent[sent:]
        if not connection.unsent:
            self._epoll.modify(connection.fileno, _EVENTS)

    def _release(self, connection: _Connection) -> None:
        """Keep the connection for later requests, or close it."""
        exchange = connection.exchange
        assert exchange is not None
        with self._lock:
            connection.exchange = None
            connection.used = True
            keep = exchange.parser.reusable and not (
                connection.unsent or exchange.aborted or self._closing
            )
            if keep and len(self._idle) < _MAX_KEPT:
                self._idle.append(connection)
                return
        self._close(connection)

    def _fail(self, connection: _Connection, reason: str) -> None:
        with self._lock:
            exchange, connection.exchange = connection.exchange, None
            if connection in self._idle:
                self._idle.remove(connection)
        self._close(connection)
        if exchange is None:
            return
        # Triton may have closed a kept connection just before the request came.
        if connection.used and not (exchange.parser.status or exchange.aborted):
            exchange.parser = ResponseParser()
            with suppress(TritonUnavailable):
                self._carry(exchange, reuse=False)
                return
        exchange.receiver.on_failure(TritonUnavailable(f"{reason}; try again"))

    def _close(self, connection: _Connection) -> None:
        with self._lock:
            if self._open.get(connection.fileno) is connection:
                del self._open[connection.fileno]
                self._epoll.unregister(connection.fileno)
                connection.socket.close()


def _stopping() -> TritonUnavailable:
    return TritonUnavailable("the server is stopping; try again")
