"""Tracing: one OpenTelemetry span a request, if OTEL_EXPORTER_OTLP_ENDPOINT is set.

Needs the packages ``opentelemetry-sdk`` and ``opentelemetry-exporter-otlp-proto-http``, which are
not dependencies of ours. Their other settings are the variables that OpenTelemetry defines.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry.metrics import code_of, outcome_of

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NS = 1_000_000_000


def enabled() -> bool:
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

    def started(self, request: GenerationRequest) -> None:
        """Does nothing."""

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
