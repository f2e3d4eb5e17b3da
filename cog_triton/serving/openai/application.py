"""ASGI application of the OpenAI API: /v1, /health, error responses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton.errors import CogTritonError, InvalidArgument, NotFound
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.error_responses import endpoint_of, json_response
from cog_triton.serving.tenant_limits import TenantLimits
from cog_triton.serving.tenants import CURRENT
from cog_triton.system.log_format import request_id

_LIMITED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
BODY_SEND = "body_send"
"""Name in a scope of the send for what follows a response's start.

It passes by the middleware, which has nothing to do there, and takes a call a message each.
"""
_REQUEST_ID = b"x-request-id"


def create_app(
    routes: Sequence[BaseRoute],
    *,
    require_ready: Callable[[], None],
    on_refused: Callable[[str, CogTritonError], None] = lambda *_: None,
    limits: TenantLimits | None = None,
) -> Starlette:
    """Create the application; all its error responses have the API's shape and our code.

    `require_ready` raises the reason while requests are not served. The front has checked keys.
    `on_refused` gets the endpoint and error of every request that is rejected before generation.
    Answers to tenants tell what is left of their `limits`.
    """

    async def health(request: Request) -> Response:
        try:
            require_ready()
        except CogTritonError as error:
            return error_responses.error_response(error, 503)
        return json_response({"status": "ready"})

    def refused(request: Request, error: Exception) -> Response:
        found = error_responses.to_coded_error(error)
        on_refused(endpoint_of(request.url.path), found)
        return error_responses.error_response(found, path=request.url.path)

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = _from_http_exception(error, request)
        on_refused(endpoint_of(request.url.path), found)
        response = error_responses.error_response(found, error.status_code, request.url.path)
        response.headers.update(error.headers or {})
        return response

    app = Starlette(
        routes=[*routes, Route("/health", health, methods=["GET"])],
        middleware=[Middleware(_ErrorMiddleware, on_refused, limits)],
        exception_handlers={CogTritonError: refused, HTTPException: http_error},
    )
    app.router.redirect_slashes = False  # the front routes them; a redirect would lose https
    return app


@dataclass(slots=True)
class _ErrorMiddleware:
    """Turns unexpected exceptions into coded error responses, and adds headers to each response."""

    app: ASGIApp
    on_refused: Callable[[str, CogTritonError], None]
    limits: TenantLimits | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            started = message["type"] == "http.response.start"
            await send(self._with_limits(_identified(message), scope) if started else message)

        scope[BODY_SEND] = send
        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if begun:
                raise
            found = error_responses.to_coded_error(error)
            self.on_refused(endpoint_of(scope["path"]), found)
            response = error_responses.error_response(found, path=scope["path"])
            await response(scope, receive, watched)

    def _with_limits(self, start: Message, scope: Scope) -> Message:
        """A response's start, with the rest of its tenant's limits below /v1."""
        tenant = CURRENT.get()
        if self.limits is None or tenant is None:
            return start
        if not scope["path"].startswith(_LIMITED_PREFIXES):
            return start
        return {**start, "headers": [*start["headers"], *self.limits.headers(tenant)]}


def _identified(start: Message) -> Message:
    """A response's start with the header x-request-id: its own id in the log, if it has one."""
    headers = list(start.get("headers", ()))
    if all(name.lower() != _REQUEST_ID for name, _ in headers):
        found = request_id.get() or f"req-{uuid.uuid4().hex}"
        headers.append((_REQUEST_ID, found.encode()))
    return {**start, "headers": headers}


def _from_http_exception(error: HTTPException, request: Request) -> CogTritonError:
    """The coded error for one of Starlette's."""
    path = repr(request.url.path)[:80]
    if error.status_code == 404:
        return NotFound(f"{path}: no such path")
    if error.status_code == 405:
        return NotFound(f"{request.method[:20]} {path}: no such method here")
    return InvalidArgument(error.detail)
