"""Metrics and traces: of generations, as platforms read them, and those of Triton."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest
from http_replies import reply, serving
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cog_triton.engines.kv_cache_stats import BLOCKS, PREFIX_HITS, PREFIX_QUERIES, KVCacheStats
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument, Overloaded, TritonUnavailable
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry import observers
from cog_triton.serving.telemetry.metrics import BatchHistogram, Metrics, inter_token_latencies
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.telemetry.platform_metrics import PlatformMetrics, TritonMetrics
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports
from cog_triton.text.sampling import SamplingParams

REQUEST = GenerationRequest(
    engine=EngineRequest(input_ids=[1] * 5, sampling=SamplingParams(max_tokens=9)),
    endpoint="chat",
)


def result(**values: Any) -> GenerationResult:
    defaults: dict[str, Any] = {
        "queue_time": 0.03,
        "output_token_count": 4,
        "time_to_first_token": 0.2,
        "duration": 0.8,
        "finish_reason": "stop",
        "arrivals": [(10.2, 1), (10.3, 2), (10.8, 1)],
    }
    return GenerationResult(**{**defaults, **values})


def read(metrics: Metrics) -> dict[str, float]:
    lines = metrics.text().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("cog_triton_"): float(value) for name, value in pairs}


def test_successful_generation_is_counted() -> None:
    metrics = Metrics()
    metrics.ended(REQUEST, result(), None)
    values = read(metrics)
    assert values['requests_total{endpoint="chat",outcome="stop"}'] == 1
    assert values["prompt_tokens_total"] == 5
    assert values["generation_tokens_total"] == 4
    assert values["time_to_first_token_seconds_sum"] == 0.2
    assert values["request_duration_seconds_sum"] == 0.8
    assert values["queue_time_seconds_sum"] == 0.03
    assert values["inter_token_latency_seconds_count"] == 3
    assert values["inter_token_latency_seconds_sum"] == pytest.approx(0.6)
    assert values['inter_token_latency_seconds_bucket{le="0.1"}'] == 2
    assert values["requests_cancelled_total"] == 0
    assert not any(name.startswith("errors_total{") for name in values)


@pytest.mark.parametrize("error", [Overloaded("x"), GeneratorExit()])
def test_disconnect_counts_as_cancelled_not_as_error(error: BaseException) -> None:
    metrics = Metrics()
    metrics.ended(REQUEST, result(cancelled=True), error)
    values = read(metrics)
    assert values["requests_cancelled_total"] == 1
    assert values['requests_total{endpoint="chat",outcome="cancelled"}'] == 1
    assert not any(name.startswith("errors_total{") for name in values)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 9))))
def test_inter_token_latencies_add_up_to_the_total_time(steps: list[tuple[float, int]]) -> None:
    now, arrivals = 0.0, []
    for pause, count in steps:
        now += pause
        arrivals.append((now, count))
    found = list(inter_token_latencies(arrivals))
    assert sum(count for _, count in found) == sum(count for _, count in steps[1:])
    total = now - arrivals[0][0] if arrivals else 0
    assert sum(gap * count for gap, count in found) == pytest.approx(total, abs=1e-9)


@given(st.lists(st.floats(-1, 6)))
def test_batch_histogram_equals_prometheus_client_histogram(values: list[float]) -> None:
    buckets = (0.5, 1.0, 2.5)
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("x", "Help", buckets=buckets, registry=theirs)
    found = BatchHistogram("x", "Help", buckets)
    ours.register(found)
    for value in values:
        expected.observe(value)
    found.observe_many((value, 1) for value in values)

    def text(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if "_created" not in line and "_sum" not in line]

    assert text(ours) == text(theirs)


LABELS = 'engine="0",model_name="a model"'
HALF = f'{BLOCKS}{{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"}} 0.5\n'


def text(kv_cache: KVCacheStats | None) -> str:
    registry = CollectorRegistry()
    registry.register(PlatformMetrics("a model", lambda: 3, lambda: 5, lambda: kv_cache))
    return generate_latest(registry).decode()


def samples(kv_cache: KVCacheStats | None) -> list[str]:
    return [line for line in text(kv_cache).splitlines() if not line.startswith("#")]


def test_names_and_labels_are_those_of_vllm() -> None:
    """The names that the endpoint picker of llm-d reads by default."""
    assert samples(KVCacheStats(0.25, 16, 1024, 700, 320)) == [
        f"vllm:num_requests_running{{{LABELS}}} 3.0",
        f"vllm:num_requests_waiting{{{LABELS}}} 5.0",
        "cog_triton_kv_cache_usage_ratio 0.25",
        f"vllm:kv_cache_usage_perc{{{LABELS}}} 0.25",
        f'vllm:cache_config_info{{block_size="16",{LABELS},num_gpu_blocks="1024"}} 1.0',
        "cog_triton_prefix_cache_queries_total 700.0",
        f"vllm:prefix_cache_queries_total{{{LABELS}}} 700.0",
        "cog_triton_prefix_cache_hits_total 320.0",
        f"vllm:prefix_cache_hits_total{{{LABELS}}} 320.0",
    ]


def client(url: str) -> TritonMetrics:
    parts = urlsplit(url)
    return TritonMetrics(parts.hostname or "", parts.port or 0)


def test_triton_is_asked_once_for_scrapes_at_one_time() -> None:
    asked = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        reply(request, 200, HALF.encode())

    with serving(answer) as url:
        triton = client(url)
        for _ in range(5):
            assert triton.kv_cache() == KVCacheStats(0.5)
        assert asked[0] == "/metrics"
        assert len(asked) < 5


def test_without_triton_there_is_no_kv_cache() -> None:
    triton = TritonMetrics("127.0.0.1", *free_ports(1))
    assert triton.kv_cache() is None
    with pytest.raises(TritonUnavailable, match="Triton's metrics: ConnectionRefusedError"):
        triton.text()


# As TensorRT-LLM's backend writes them; the second model is one beside it.
TENSORRT_LLM = """\
# HELP nv_trt_llm_kv_cache_block_metrics TRT LLM KV cache block metrics
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="other",version="1"} 1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 1560
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 4680
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6240
"""  # noqa: E501
REUSED = f'{BLOCKS}{{kv_cache_block_type="reused",model="tensorrt_llm",version="1"}} 1e3\n'


def text_of(stats: KVCacheStats) -> str:
    lines = [
        f'{BLOCKS}{{version="1",model="tensorrt_llm",kv_cache_block_type="{name}"}} {value}'
        for name, value in stats.block_metrics().items()
    ]
    counts = {PREFIX_QUERIES: stats.prefix_queries, PREFIX_HITS: stats.prefix_hits}
    lines += [
        f'{name}{{model="tensorrt_llm",version="1"}} {count}'
        for name, count in counts.items()
        if count is not None
    ]
    return "\n".join(lines)


def test_what_is_written_is_read_again() -> None:
    for stats in (
        KVCacheStats(0.5),
        KVCacheStats(0.0, 32),
        KVCacheStats(1 / 3, 16, 1024),
        KVCacheStats(1.0, 16, 1024, 0, 0),
        KVCacheStats(0.125, 16, 1024, 700, 320),
    ):
        assert KVCacheStats.from_metrics(text_of(stats)) == stats


def test_tensorrt_llm_metrics_are_read() -> None:
    assert KVCacheStats.from_metrics(TENSORRT_LLM) == KVCacheStats(0.25, 64, 6240)
    reuses = KVCacheStats.from_metrics(TENSORRT_LLM + REUSED)
    assert reuses == KVCacheStats(0.25, 64, 6240, None, 64_000)


def test_counters_continue_those_of_an_engine_that_has_died() -> None:
    before, now = KVCacheStats(0.5, 16, 8, 100, 40), KVCacheStats(0.1, 16, 8, 5, 1)
    assert now.after(None) == now
    assert now.after(before) == KVCacheStats(0.1, 16, 8, 105, 41)


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
