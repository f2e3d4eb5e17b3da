"""Applications of OPENAI_PORT and METRICS_PORT: they answer before the engine is loaded."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cog_triton import __version__
from cog_triton.artifact import engine_manifest
from cog_triton.errors import CogTritonError, InvalidArgument, NotFound, TritonUnavailable
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.error_responses import endpoint_of, json_response
from cog_triton.serving.openai.routes import OpenAIRoutes
from cog_triton.serving.openai.schema import openapi
from cog_triton.serving.openai.served_models import ServedAPI, ServedModels
from cog_triton.serving.openai.stored_responses import RunningResponses
from cog_triton.serving.openai.streaming import BODY_SEND
from cog_triton.serving.runtime import Runtime
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.telemetry.platform_metrics import (
    EngineMemory,
    LoRARequests,
    PlatformMetrics,
    TritonMetrics,
)
from cog_triton.serving.tenant_limits import TenantLimits
from cog_triton.serving.tenants import CURRENT
from cog_triton.settings import Settings
from cog_triton.system.log_format import request_id

_PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DEFAULT_MODEL_NAME = "cog-triton"
_PACKAGE = "pypi:"


class ServedApplications:
    """Makes the applications of OPENAI_PORT and METRICS_PORT, `apps` by these names."""

    def __init__(
        self,
        settings: Settings,
        telemetry: CompositeObserver,
        apps: Mapping[str, ReplaceableApp],
        responses: RunningResponses | None,
    ) -> None:
        """`settings` have Triton's private ports."""
        self._settings, self._responses = settings, responses
        self._telemetry = telemetry
        self._metrics = telemetry.metrics
        self._triton = TritonMetrics(settings.triton_host, settings.triton_metrics_port)
        self._apps = apps

    def serve_runtime(self, runtime: Runtime) -> None:
        """Replace the 503 responses by the API and metrics of `runtime`."""
        self._register_gauges(runtime)
        for port, app in self._apps.items():
            texts = {"/metrics": self._metrics.text, "/metrics/triton": self._triton.text}
            routes = [
                Route(path, partial(_metrics_response, text), methods=["GET"])
                for path, text in texts.items()
            ]
            if port == "OPENAI_PORT":
                models = ServedModels(model_name(runtime), runtime.adapters, _model_id(runtime))
                abilities = runtime.family.abilities
                given = (runtime.generator, models, abilities, runtime.sampling_defaults)
                api = ServedAPI(self._settings, *given, runtime.borrowed, self._responses)
                routes += [
                    *OpenAIRoutes(api).routes(),
                    Route("/openapi.json", _schema, methods=["GET"]),
                    Route("/version", _version, methods=["GET"]),
                ]
            app.current = create_app(
                routes,
                require_ready=runtime.require_ready,
                on_refused=self._telemetry.refused,
                limits=runtime.generator.tenant_limits,
            )

    def _register_gauges(self, runtime: Runtime) -> None:
        admission, supervisor, metrics = runtime.admission, runtime.supervisor, self._metrics
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "requests_running": ("Requests the engine has", lambda: admission.running),
            "requests_waiting": ("Requests that wait for their turn", lambda: admission.waiting),
            "ready": ("1 while requests are served", lambda: supervisor.error is None),
            "engines": ("Engines that serve", lambda: supervisor.engines),
        }
        for name, (text, value) in gauges.items():
            metrics.register_gauge(name, text, value)
        metrics.registry.register(
            PlatformMetrics(
                model_name(runtime),
                lambda: admission.running,
                lambda: admission.waiting,
                self._triton.kv_cache,
            )
        )
        if runtime.adapters is not None:
            most, use = runtime.adapters.limits.max_loras, runtime.generator.adapter_use
            metrics.registry.register(LoRARequests(most, use))
        metrics.register_counter(
            "engine_restarts", "How often Triton was started again", lambda: supervisor.restarts
        )
        metrics.register_counter(
            "planned_restarts",
            "How often Triton was restarted as planned, by the reason",
            lambda: supervisor.planned_restarts,
            reason="memory",
        )
        metrics.registry.register(EngineMemory(supervisor.engine_memory))
        if (steps := runtime.step_streams) is not None:
            metrics.register_gauge(
                "step_lag",
                "Steps of the engine that the last read brought: 1 while the server keeps up",
                lambda: steps.lag,
            )
            metrics.register_counter(
                "steps_lost", "Steps of the engine lost on their way", lambda: steps.lost_steps
            )


async def _metrics_response(text: Callable[[], bytes], request: Request) -> Response:
    """Metrics of ours, or of Triton, whose port may be reachable from this machine only."""
    content = await asyncio.to_thread(text)
    return Response(content, headers={"Content-Type": _PROMETHEUS_CONTENT_TYPE})


class ReplaceableApp:
    """ASGI application that can be replaced while it is served."""

    def __init__(self, app: ASGIApp) -> None:
        self.current = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.current(scope, receive, send)


def model_name(runtime: Runtime) -> str:
    """SERVED_MODEL_NAME, else the model id of the engine's manifest.

    Of one in a Python package it is the package's name: ``pypi:NAME==VERSION`` is no name within a
    URL, nor after a provider's (``openai:NAME``).
    """
    if runtime.settings.served_model_name:
        return runtime.settings.served_model_name
    name = _model_id(runtime) or _DEFAULT_MODEL_NAME
    return name.removeprefix(_PACKAGE).partition("==")[0] if name.startswith(_PACKAGE) else name


def _model_id(runtime: Runtime) -> str | None:
    manifest = engine_manifest.load(runtime.family.directory)
    return manifest.model_id if manifest else None


async def starting_app(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application that answers 503 to every request."""
    error = TritonUnavailable("the server is starting; try again")
    await error_responses.error_response(error, path=scope["path"])(scope, receive, send)


async def _version(request: Request) -> Response:
    return json_response({"version": __version__})


async def _schema(request: Request) -> Response:
    return error_responses.json_response(openapi())


_LIMITED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
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
