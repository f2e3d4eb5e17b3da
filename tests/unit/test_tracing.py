"""OpenTelemetry tracing: enabled by its variables, with its packages installed."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler

import pytest
from http_replies import reply, serving
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument, Overloaded
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry import observers
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.settings import load_settings
from cog_triton.text.sampling import SamplingParams


def test_tracing_is_disabled_by_default() -> None:
    assert not observers.tracing_enabled()
    CompositeObserver(load_settings())


def test_enabled_without_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidArgument, match=r"OTEL_EXPORTER_OTLP_ENDPOINT.*opentelemetry-sdk"):
        CompositeObserver(load_settings())


def test_spans_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        bodies.append(request.rfile.read(int(request.headers["Content-Length"])))
        reply(request, 200)

    with serving(answer) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "here")
        tracer = observers.TracingObserver()
        request = GenerationRequest(
            engine=EngineRequest(input_ids=[1, 2], sampling=SamplingParams(max_tokens=9)),
            id="id-1",
            endpoint="chat",
        )
        result = GenerationResult(output_token_count=3, finish_reason="stop", duration=0.5)
        tracer.ended(request, result, None)
        tracer.ended(request, result, Overloaded("full"))
        tracer.close()
    found = trace_service_pb2.ExportTraceServiceRequest.FromString(bodies[0]).resource_spans[0]
    assert any(item.value.string_value == "here" for item in found.resource.attributes)
    good, bad = found.scope_spans[0].spans
    values = {item.key: item.value for item in good.attributes}
    assert values["gen_ai.response.id"].string_value == "id-1"
    assert values["gen_ai.usage.output_tokens"].int_value == 3
    assert good.end_time_unix_nano - good.start_time_unix_nano == pytest.approx(5e8, abs=1e3)
    assert bad.status.message == "E2107"
