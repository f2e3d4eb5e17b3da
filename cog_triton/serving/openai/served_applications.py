"""Applications of OPENAI_PORT and METRICS_PORT: they answer before the engine is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cog_triton import __version__
from cog_triton.artifact import engine_manifest
from cog_triton.errors import TritonUnavailable
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.application import create_app
from cog_triton.serving.openai.error_responses import json_response
from cog_triton.serving.openai.routes import OpenAIRoutes
from cog_triton.serving.openai.schema import openapi
from cog_triton.serving.openai.served_models import ServedAPI, ServedModels
from cog_triton.serving.openai.stored_responses import RunningResponses
from cog_triton.serving.runtime import Runtime
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.telemetry.platform_metrics import (
    EngineMemory,
    LoRARequests,
    PlatformMetrics,
    TritonMetrics,
)
from cog_triton.settings import Settings

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
