"""Gates: what decides on the requests of one port, and how refusals look there.

A gate is the port's ASGI application. Here are those before the OpenAI API and before metrics.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton import errors
from cog_triton.errors import CogTritonError
from cog_triton.front.access import Access
from cog_triton.front.cog_state import Upstream
from cog_triton.front.json_body import (
    ENCODINGS,
    JSONLimits,
    Numbers,
    inflated,
    require_bounded,
)
from cog_triton.front.keyring import Api
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import NO_ROOM, Answer, Forward, Limits, Refused, Request, json_answer
from cog_triton.front.pass_through import pass_on
from cog_triton.serving.openai import error_responses
from cog_triton.serving.tenants import CURRENT
from cog_triton.system.redaction import KEY_HEADERS

STOPPING = "the server is stopping; try again"
_NEVER = re.compile(r"(?!)")
_LOG = logging.getLogger(__name__)
_CODE = error_responses.CODE_HEADER.encode()


def status_of(error: CogTritonError) -> int:
    """The HTTP status: 4xx for errors of the caller, 503 for transient ones."""
    if isinstance(error, errors.Overloaded):
        return 503
    return error_responses.status_of(error)


def triton_refusal(status: int, error: CogTritonError, path: str = "") -> Answer:
    """An error as Triton's HTTP API words it."""
    return json_answer(status, {"error": str(error)}, *_headers(status))


def cog_refusal(status: int, error: CogTritonError, path: str = "") -> Answer:
    """An error as Cog's HTTP API words it, those of predictions included."""
    body = {"error": str(error), "status": "failed"}
    return json_answer(status, body, *_headers(status))


def _headers(status: int) -> list[tuple[bytes, bytes]]:
    if status == 401:
        return [(b"www-authenticate", b"Bearer")]
    after = error_responses.RETRY_AFTER_S.get(status)
    return [(b"retry-after", after.encode())] if after else []


class Gate(ABC):
    """What may pass on one port, and what refusals look like there: an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, which has arrived whole, or have it answered."""
        try:
            await self._answer(scope, receive, send)
        finally:
            scope["connection"].on_application_end(scope)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (arrived := await receive())["type"] == "http.disconnect":
            return
        connection, method = scope["connection"], scope["method"]
        request = Request(
            method,
            scope["raw_path"],
            scope["headers"],
            arrived["body"],
            str(scope["client"][0]) if scope["client"] else "",
            unaware=connection.unaware,
            take_bytes=connection.take_bytes,
        )
        del arrived  # the body is passed on, and need not be in memory until the answer ends
        path = request.path
        try:
            decided = await self.decide(request)
            del request
            if isinstance(decided, Forward):
                await pass_on(decided, scope, receive, send)
            else:
                await decided(scope, receive, send)
            return
        except Refused as refused:
            is_probe = method in ("GET", "HEAD") and refused.status == 503
            refused.log(path, is_probe=is_probe)
            answer = self.refusal(refused.status, refused.error, path)
        except Exception:
            if connection.begun:
                raise
            _LOG.exception("a request failed in the front")
            answer = self.refusal(500, errors.TritonUnknownError("the front failed"), path)
        await answer(scope, receive, send)

    @abstractmethod
    async def decide(self, request: Request) -> Forward | ASGIApp:
        """Where the request goes, or what answers it.

        Raises:
            Refused: it does not pass.
        """

    @abstractmethod
    def refusal(self, status: int, error: errors.CogTritonError, path: str = "") -> Answer:
        """An error in the shape of the API behind the port, or of that of `path`."""


@dataclass(eq=False)
class PrivateGate(Gate):
    """Base of gates before `upstream`, for a public `port`; a coded error has its status."""

    upstream: Upstream
    port: str
    access: Access
    limits: Limits
    large_bodies: LargeBodies

    dropped = KEY_HEADERS | {b"content-encoding"}
    """Headers that are not passed on."""
    numbers = Numbers.EACH
    """How numbers in lists count among the values of a body."""
    error_event = b""
    """First line of an error in an event stream."""
    readiness = _NEVER
    """Paths of readiness probes, which fail as soon as the server is to stop."""
    ends_work = _NEVER
    """Requests ("METHOD path") that are taken while it stops, beside those that only read."""

    async def decide(self, request: Request) -> Forward | ASGIApp:
        try:
            if self.upstream.stopping and not request.unaware:
                self._refuse_new(request)
            return await self._decide(request)
        except errors.CogTritonError as error:
            refused = Refused(status_of(error), error)
            self.access.refusals.count(refused)
            raise refused from error
        except Refused as refused:
            self.access.refusals.count(refused)
            raise

    def _refuse_new(self, request: Request) -> None:
        path = request.path
        reads = request.method in ("GET", "HEAD") and not self.readiness.fullmatch(path)
        if not reads and not self.ends_work.fullmatch(f"{request.method} {path}"):
            raise errors.TritonUnavailable(STOPPING)

    @abstractmethod
    async def _decide(self, request: Request) -> Forward | ASGIApp:
        """As `decide`; raises coded errors."""

    async def _inflated(self, request: Request) -> Request:
        """The request with its body before compression; raises Refused, 415, if it cannot be."""
        encoding = request.header(b"content-encoding").lower().decode("latin-1")
        if not request.body or encoding in ("", "identity"):
            return request
        if encoding not in ENCODINGS:
            rule = f"Content-Encoding={encoding[:20]!r}: must be {', '.join(ENCODINGS)} or identity"
            raise Refused(415, errors.InvalidArgument(rule))
        limit = self.limits.body_bytes  # of bytes: those of few may have been many
        body = await self.large_bodies.run(limit, inflated, request.body, encoding, limit)
        if not request.take_bytes(len(body)):
            del body  # the error's frames would keep it until the next garbage collection
            raise errors.Overloaded(NO_ROOM)
        return replace(request, body=body)

    async def _require_bounded(self, body: bytes) -> None:
        await self.large_bodies.run(len(body), require_bounded, body, self.json_limits)

    def _forward(self, request: Request) -> Forward:
        return Forward(
            self.upstream.ports[self.port],
            request.method,
            request.target,
            self._passed_headers(request),
            request.body,
            cut=self._cut,
        )

    def _passed_headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        return [pair for pair in request.headers if pair[0] not in self.dropped]

    @cached_property
    def json_limits(self) -> JSONLimits:
        """Bounds of the JSON of a body."""
        return JSONLimits(values=self.limits.json_values, numbers=self.numbers)

    @cached_property
    def _cut(self) -> bytes:
        error = errors.TritonUnavailable("the server behind this port broke off; try again")
        return self.error_event + b"data: " + self.refusal(503, error).body + b"\n\n"


_HEALTH = "/health"
_MODELS = "/v1/models"
_KEY_ONLY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_METRICS = ("/metrics", "/metrics/triton")


def _page() -> Answer:
    """The page at ``/``: one file without anything secret in it.

    Its Content Security Policy lets run only the script that is in it, known by its hash.
    """
    text = (Path(__file__).parent / "page.html").read_bytes()
    hashes = {}
    for tag in ("script", "style"):
        (inline,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), text, re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(inline).digest()).decode()
    policy = (
        "default-src 'none'",
        f"script-src 'sha256-{hashes['script']}'",
        f"style-src 'sha256-{hashes['style']}'",
        "connect-src 'self'",
        "img-src data:",  # its icon, and images that its user adds
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    headers = (
        (b"cache-control", b"no-cache"),
        (b"content-security-policy", "; ".join(policy).encode()),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    )
    return Answer(200, text, b"text/html; charset=utf-8", headers)


PAGE = _page()


@dataclass(eq=False)
class OpenAIGate(PrivateGate):
    """Decides on requests to the OpenAI API, `app`; answers have the shape of its errors."""

    numbers = Numbers.IDS
    readiness = re.compile(_HEALTH)
    ends_work = re.compile(r"(?:POST /v1/responses/[^/]+/cancel|DELETE /v1/responses/[^/]+)")

    metrics_public: bool = field(kw_only=True)
    app: ASGIApp | None = field(default=None, kw_only=True)
    """Answers in this process; else a server behind does."""
    page: bool = field(default=False, kw_only=True)
    """Whether ``/`` is the page, which needs no key: it asks for one."""

    async def decide(self, request: Request) -> Forward | ASGIApp:
        # Routes see the path decoded, and below /v1 without a slash at its end.
        _, mark, query = request.target.partition(b"?")
        path = unquote(request.path)
        path = path.rstrip("/") if path.startswith("/v1/") else path
        return await super().decide(replace(request, target=quote(path).encode() + mark + query))

    def refusal(self, status: int, error: errors.CogTritonError, path: str = "") -> Answer:
        """An error as the API of `path` words it: OpenAI's, or Anthropic's."""
        body = error_responses.error_body(error, status, path)
        return json_answer(status, body, (_CODE, error.code.encode()), *_headers(status))

    async def _decide(self, request: Request) -> Forward | ASGIApp:
        reads = request.method in ("GET", "HEAD")
        asks_page = self.page and reads and request.path == "/"
        if asks_page and self.access.locked:
            return PAGE
        if request.path == _HEALTH:
            self.upstream.state.require_checked()
        public = (_HEALTH, *_METRICS) if self.metrics_public else (_HEALTH,)
        if not (reads and request.path in public):
            request = self.access.check(request, _api_of(request.path))
        if asks_page:
            return PAGE
        if request.path in _KEY_ONLY and not self.access.locked:
            raise errors.Unauthorized(
                "adapters are loaded at run time where COG_TRITON_API_KEY is set, and it is not"
            )
        request = await self._inflated(request)
        await self._require_bounded(request.body)
        if self.app is None:
            revise = self.access.refusals.with_metrics if self.access.locked else None
            return replace(self._forward(request), revise=revise)
        return Passed(self.app, replace(request, headers=self._passed_headers(request)))


@dataclass(slots=True)
class Passed:
    """What an application of this process answers, as an ASGI application."""

    app: ASGIApp
    request: Request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self.request
        message: Message | None = {"type": "http.request", "body": request.body}
        del self.request
        _, _, query = request.target.partition(b"?")
        CURRENT.set(request.tenant)
        changed = {"path": unquote(request.path), "query_string": query, "headers": request.headers}
        del request

        async def received() -> Message:
            nonlocal message
            if (first := message) is not None:
                message = None
                return first
            return await receive()

        await self.app({**scope, **changed}, received, send)


class MetricsGate(OpenAIGate):
    """Lets nothing pass but metrics and health."""

    async def _decide(self, request: Request) -> Forward | ASGIApp:
        known = request.path in (_HEALTH, *_METRICS)
        if not known or request.method not in ("GET", "HEAD"):
            rule = f"{request.method[:20]} {request.path[:80]!r}: no such path or method"
            raise errors.NotFound(rule)
        return await super()._decide(request)


def _api_of(path: str) -> Api:
    if path in _KEY_ONLY:
        return "adapters"
    return "metrics" if path in _METRICS else "openai"
