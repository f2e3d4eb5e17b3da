"""Incremental HTTP/1.1 request parser over llhttp, and the limits of the front door.

A request is kept until all of it has arrived, for only what was parsed is passed on. Limits hold
while it arrives: a request that is too large costs no more than the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import httptools

from cog_triton import errors
from cog_triton.door.message import Headers, Refused, Request
from cog_triton.settings.addresses import AccessSettings

NO_ROOM = "requests that are being answered hold all memory for bodies; try again"
_OWN_DESCRIPTORS = 64
_BODIES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds, connections over all ports together.

    `arrival_s` bounds the time from a request's first byte to its last, `idle_s` the time between
    the requests of a connection, before the first, and without reading an answer. `json_depth`
    counts nested arrays and objects, `json_values` all values of a body.
    """

    body_bytes: int = 8 << 20
    header_bytes: int = 32 << 10
    json_depth: int = 64
    json_values: int = 32768
    connections: int = 4096
    arrival_s: float = 30.0
    idle_s: float = 75.0

    @property
    def all_bodies_bytes(self) -> int:
        """Bodies of all requests that are arriving or being answered, together."""
        return _BODIES_AT_ONCE * self.body_bytes

    @classmethod
    def of(cls, settings: AccessSettings, descriptors: int) -> Self:
        """The limits of `settings` for a process that may have so many open files.

        A connection takes two of them, its own and one to the server behind.
        """
        return cls(
            body_bytes=settings.max_request_bytes,
            header_bytes=settings.max_header_bytes,
            json_depth=settings.max_json_depth,
            json_values=settings.max_json_values,
            connections=min(
                settings.max_connections, max(1, (descriptors - _OWN_DESCRIPTORS) // 2)
            ),
            arrival_s=settings.request_timeout,
            idle_s=settings.idle_timeout,
        )


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_PIPELINED = 64
# coglet takes 100, of which the door itself writes some.
_MAX_HEADERS = 96
# Sent bytes for each byte of a body: one-byte chunks take six.
_MAX_OVERHEAD = 8


class RequestParser:
    """Parses the requests of one connection."""

    def __init__(self, limits: Limits, peer: str, take_bytes: Callable[[int], bool]) -> None:
        """`take_bytes` is asked for room for each piece of a body."""
        self._limits = limits
        self._peer = peer
        self._take_bytes = take_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._refused: Refused | None = None
        self.complete: deque[Request] = deque()
        self._begin()
        self.is_between_requests = True
        """Whether nothing of a further request has arrived."""
        self.wants_continue = False
        """Whether the client waits for leave to send a body; the caller unsets it."""

    @property
    def path(self) -> str:
        """The path of the request that arrives, or arrived last, as far as it is known."""
        target = self._target or (self.complete[-1].target if self.complete else b"")
        return target.partition(b"?")[0].decode("utf-8", "replace")

    def feed(self, data: bytes) -> None:
        """Take what has arrived; requests that are whole by now are in `complete`.

        Raises:
            Refused: 400 not HTTP, 413 a body, 431 headers beyond the limit, 503 no room.
        """
        self._size += len(data)
        while data:
            data = self._parsed(data)
        if self._in_head and self._size > self._limits.header_bytes:
            raise self._too_many_headers()
        if self._size > self._most_bytes():
            raise self._too_large(f"more than {self._limits.body_bytes} bytes as sent")

    def _parsed(self, data: bytes) -> bytes:
        """Parse `data` as far as llhttp does; returns what is left of it."""
        rest = b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if self._refused is None:
                rule = str(error) or type(error).__name__
                problem = errors.InvalidArgument(f"request: not HTTP/1.1: {rule}")
                raise Refused(400, problem) from error
        if self._refused is not None:
            raise self._refused
        return rest

    def on_message_begin(self) -> None:
        self.is_between_requests = False

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._check_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nothing that was decided on the headers may change
        self._headers.append((name.lower(), value.strip()))
        if len(self._headers) > _MAX_HEADERS:
            rule = f"headers: more than {_MAX_HEADERS}"
            self._end(Refused(431, errors.RequestTooLarge(rule)))
        self._check_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._target[:1] != b"/":
            self._refuse(400, "request: the target must begin with /")
        names = [name for name, _ in self._headers]
        if names.count(b"host") > 1:
            self._refuse(400, "Host: must be given once")
        lengths = [value for name, value in self._headers if name == b"content-length"]
        if len(lengths) + names.count(b"transfer-encoding") > 1:
            self._refuse(400, "Content-Length: must be given once, without Transfer-Encoding")
        if lengths and int(lengths[0]) > self._limits.body_bytes:
            self._end(self._too_large(f"{int(lengths[0])} bytes"))
        expected = dict(self._headers).get(b"expect", b"")
        self.wants_continue = expected.lower() == b"100-continue"

    def on_body(self, data: bytes) -> None:
        self.wants_continue = False
        self._body += data
        if len(self._body) > self._limits.body_bytes:
            self._end(self._too_large(f"more than {self._limits.body_bytes} bytes"))
        if not self._take_bytes(len(data)):
            self._end(Refused(503, errors.Overloaded(NO_ROOM)))

    def on_message_complete(self) -> None:
        self.complete.append(
            Request(
                self._parser.get_method().decode("ascii"),
                bytes(self._target),
                self._headers,
                bytes(self._body),
                self._parser.should_keep_alive(),
                self._peer,
                0 if self._parser.get_http_version() == "1.0" else 1,
            )
        )
        if len(self.complete) > _MAX_PIPELINED:
            self._refuse(400, f"requests: {_MAX_PIPELINED} at most before the first is answered")
        self.wants_continue = False
        self.is_between_requests = True
        self._begin()

    def _begin(self) -> None:
        self._target = bytearray()
        self._headers: Headers = []
        self._body = bytearray()
        self._in_head = True
        self._size = 0
        self._parsed_head = 0

    def _most_bytes(self) -> int:
        return _MAX_OVERHEAD * self._limits.body_bytes + self._limits.header_bytes + (1 << 20)

    def _check_head(self, size: int) -> None:
        self._parsed_head += size
        if self._parsed_head > self._limits.header_bytes:
            self._end(self._too_many_headers())

    def _without_upgrade(self) -> bytes:
        """The head that was parsed last, to be parsed anew as if it asked for no other protocol.

        llhttp takes such a request to end with its head (RFC 9110, 7.8, lets a server ignore it).
        """
        request = self.complete.pop()
        if request.method == "CONNECT":
            raise Refused(400, errors.InvalidArgument("CONNECT: this is no proxy"))
        self._parser = httptools.HttpRequestParser(self)
        lines = [b"%b %b HTTP/1.%d" % (request.method.encode(), request.target, request.version)]
        lines += [b"%b: %b" % pair for pair in request.headers if pair[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _refuse(self, status: int, rule: str) -> None:
        self._end(Refused(status, errors.InvalidArgument(rule)))

    def _end(self, refused: Refused) -> None:
        """End the parse: llhttp has no other way out of a callback than an exception."""
        self._refused = self._refused or refused
        raise refused

    def _too_many_headers(self) -> Refused:
        limit = self._limits.header_bytes
        rule = f"request line and headers: more than {limit} bytes (MAX_HEADER_BYTES)"
        return Refused(431, errors.RequestTooLarge(rule))

    def _too_large(self, size: str) -> Refused:
        limit = self._limits.body_bytes
        rule = f"the body has {size}; MAX_REQUEST_BYTES is {limit}"
        return Refused(413, errors.RequestTooLarge(rule))
