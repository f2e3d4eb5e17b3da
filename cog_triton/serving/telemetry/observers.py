"""Observers of generations: the request log, traces, and one that forwards to both and metrics.

A trace has one OpenTelemetry span a request, if OTEL_EXPORTER_OTLP_ENDPOINT is set. That needs the
packages ``opentelemetry-sdk`` and ``opentelemetry-exporter-otlp-proto-http``, which are not
dependencies of ours. Their other settings are the variables that OpenTelemetry defines.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.serving.generation import GenerationRequest, GenerationResult, Observer
from cog_triton.serving.telemetry.metrics import Metrics, code_of, outcome_of
from cog_triton.serving.tenants import CURRENT
from cog_triton.settings.request_defaults import LogSettings
from cog_triton.system import log_format

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NS = 1_000_000_000


class RequestLog:
    """Observer that logs an event for each request; see `cog_triton.system.log_format`."""

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        outcome = outcome_of(result, error)
        values: dict[str, Any] = {
            "id": request.id,
            "endpoint": request.endpoint,
            "tenant": request.tenant.name if request.tenant else None,
            "outcome": outcome,
            "prompt_tokens": result.prompt_tokens(request),
            "cached_tokens": result.cached_tokens or None,
            "output_tokens": result.output_token_count,
            "reasoning_tokens": result.reasoning_tokens or None,
            "queue_s": _rounded(result.queue_time),
            "ttft_s": _rounded(result.time_to_first_token),
            "duration_s": _rounded(result.duration),
        }
        if result.interruptions:
            values["interruptions"] = result.interruptions
            values["resumed_after_tokens"] = [tokens for tokens, _ in result.resumptions] or None
            values["resume_wait_s"] = _rounded(sum(waited for _, waited in result.resumptions))
        if outcome == "error" and error is not None:
            values["code"] = code_of(error)
        log_format.log_request(values)

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        tenant = CURRENT.get()
        log_format.log_refusal(endpoint, error, tenant=tenant and tenant.name)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def tracing_enabled() -> bool:
    """Whether the environment enables tracing."""
    return any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)


class TracingObserver:
    """Observer that exports a span after its request has ended."""

    def __init__(self) -> None:
        """Raises E1005 when the packages are not installed."""
        try:
            resources = importlib.import_module("opentelemetry.sdk.resources")
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            self._trace: Any = importlib.import_module("opentelemetry.trace")
        except ImportError as error:
            raise InvalidArgument(
                f"{_ENDPOINT_VARIABLES[0]}: is set, but {error.name} is not installed: install"
                " opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, or unset it"
            ) from error
        name = os.environ.get("OTEL_SERVICE_NAME", "cog-triton")
        provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": name}))
        provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        self._provider = provider
        self._tracer = provider.get_tracer("cog_triton")

    def close(self) -> None:
        """Export pending spans."""
        self._provider.shutdown()

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        """See `Observer.ended`. Attributes follow OpenTelemetry's conventions for generative AI."""
        outcome = outcome_of(result, error)
        values: dict[str, Any] = {
            "gen_ai.response.id": request.id,
            "gen_ai.operation.name": request.endpoint,
            "gen_ai.usage.input_tokens": result.prompt_tokens(request),
            "gen_ai.usage.output_tokens": result.output_token_count,
            "gen_ai.response.finish_reasons": [outcome],
            "cog_triton.time_to_first_token": result.time_to_first_token,
            "cog_triton.queue_time": result.queue_time,
        }
        end = time.time_ns()
        span = self._tracer.start_span(
            "generate",
            start_time=end - int(result.duration * _NS),
            kind=self._trace.SpanKind.SERVER,
            attributes={key: value for key, value in values.items() if value is not None},
        )
        if outcome == "error" and error is not None:
            span.set_attribute("error.type", code_of(error))
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, code_of(error)))
        span.end(end_time=end)

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """Does nothing: rejected requests have no span."""


class CompositeObserver:
    """Forwards every event to the observers that are enabled by settings."""

    def __init__(self, settings: LogSettings) -> None:
        """Raises E1005 when tracing is enabled and its packages are not installed."""
        self.metrics = Metrics()
        observers: list[Observer] = [self.metrics]
        if settings.log_requests:
            observers.append(RequestLog())
        if tracing_enabled():
            observers.append(TracingObserver())
        self._observers: Sequence[Observer] = observers

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        for observer in self._observers:
            observer.ended(request, result, error)

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        for observer in self._observers:
            observer.refused(endpoint, error)
