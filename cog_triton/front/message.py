"""HTTP messages of the front: a request that has arrived, and what becomes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

from starlette.types import Receive, Scope, Send

from cog_triton.errors import CogTritonError
from cog_triton.front.coded_events import CodedEnd
from cog_triton.serving.openai.error_responses import endpoint_of
from cog_triton.serving.tenants import Tenant
from cog_triton.settings.addresses import AccessSettings
from cog_triton.system.log_format import log_refusal

Headers = list[tuple[bytes, bytes]]
NO_ROOM = "requests that are being answered hold all memory for bodies; try again"
_OWN_DESCRIPTORS = 64
_BODIES_AT_ONCE = 16

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::\d+)?")

# Of one hop each (RFC 9110, 7.6.1); the front writes its own.
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"content-length", b"date", b"expect", b"http2-settings", b"keep-alive"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds, connections over all ports together.

    `arrival_s` bounds the time from a request's first byte to its last, `idle_s` the time between
    the requests of a connection, before the first, and without reading an answer. `json_values`
    counts all values of a body.
    """

    body_bytes: int = 8 << 20
    header_bytes: int = 32 << 10
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

        A prediction takes three of them: its client's, Cog's and the one from Cog's worker.
        """
        able = max(1, (descriptors - _OWN_DESCRIPTORS) // 3)
        sizes = settings.max_request_bytes, settings.max_header_bytes
        times = settings.request_timeout, settings.idle_timeout
        return cls(*sizes, settings.max_json_values, min(settings.max_connections, able), *times)


class Refused(Exception):
    """A request that is not passed on: the status and error of the answer to it."""

    def __init__(self, status: int, error: CogTritonError, tenant: str = "") -> None:
        """`tenant` is whose key it came with, where that is known."""
        super().__init__(str(error))
        self.status = status
        self.error = error
        self.tenant = tenant

    def log(self, path: str, *, is_probe: bool = False) -> None:
        """Log it, unless it is a probe of readiness."""
        if not is_probe:
            log_refusal(endpoint_of(path), self.error, tenant=self.tenant)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that has arrived whole; header names are in lower case, `target` as it was sent.

    `peer` is the client's address; a gate finds the `tenant`. `unaware`: its client could not know
    that the server stops. `take_bytes` takes so many bytes more for the body, if they are free.
    """

    method: str
    target: bytes
    headers: Headers
    body: bytes
    peer: str = ""
    tenant: Tenant | None = None
    unaware: bool = False
    take_bytes: Callable[[int], bool] = lambda _: True

    @property
    def path(self) -> str:
        """The target without its query; undecodable bytes are replaced."""
        return self.target.partition(b"?")[0].decode("utf-8", "replace")

    @property
    def host_name(self) -> str:
        """Host without its port; empty if it is missing or malformed."""
        match = _HOST.fullmatch(self.header(b"host").decode("latin-1"))
        return match["name"] if match else ""

    def header(self, name: bytes) -> bytes:
        """The first header `name`, empty if there is none."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the front's own, as an ASGI application."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status, "headers": self._all}
        await send(start)
        await send({"type": "http.response.body", "body": self.body})

    def encoded(self) -> bytes:
        """The whole response, the last one of its connection."""
        lines = [b"HTTP/1.1 %d %b" % (self.status, HTTPStatus(self.status).phrase.encode())]
        lines += [b"%b: %b" % pair for pair in (*self._all, (b"connection", b"close"))]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body

    @property
    def _all(self) -> Headers:
        length = b"%d" % len(self.body)
        own = ((b"content-type", self.content_type), (b"content-length", length))
        return [*own, *self.headers]


@dataclass(slots=True)
class Forward:
    """A request to write again to 127.0.0.1:`port`, and how its response is passed on.

    `revise`, given the status and body of a response that is short, may return another in its
    place. `redact` gets every piece of a response that is an error, and does not change its length.

    `edit` gets every piece of an event stream, and may retain some of it, which its `end` returns;
    `cut` is the event that ends one which broke off. `ended` is called at the end: whether the
    response came whole.
    """

    port: int
    method: str
    target: bytes
    headers: Headers
    body: bytes
    revise: Callable[[int, bytes], Answer | None] | None = None
    redact: Callable[[bytes], bytes] | None = None
    edit: CodedEnd | None = None
    cut: bytes = b""
    ended: Callable[[bool], None] = lambda _: None

    def encoded(self) -> bytes:
        """The request as sent: one Content-Length, one hop, closed by the server when answered."""
        lines = [b"%b %b HTTP/1.1" % (self.method.encode(), self.target)]
        lines += [b"%b: %b" % pair for pair in end_to_end(self.headers)]
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: %d" % len(self.body))
        lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


def end_to_end(headers: Headers) -> Headers:
    """The headers that are of more than one hop, in order.

    Of those that Connection lists, only private ones (X-) are not: what a gate has decided on is
    what the server behind it gets.
    """
    listed = {
        name.strip().lower()
        for key, value in headers
        if key == b"connection"
        for name in value.split(b",")
        if name.strip().lower().startswith(b"x-")
    }
    dropped = _HOP_BY_HOP | listed
    return [(name, value) for name, value in headers if name not in dropped]


def json_answer(status: int, body: Any, *headers: tuple[bytes, bytes]) -> Answer:
    """An answer with a JSON body, in ASCII."""
    return Answer(status, json.dumps(body, separators=(",", ":")).encode(), headers=headers)
