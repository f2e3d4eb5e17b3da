"""Prometheus metrics of finished generations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import Overloaded, PromptTooLong
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry.metrics import BatchHistogram, Metrics, inter_token_latencies
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


def test_generation_that_was_never_admitted_has_no_queue_time() -> None:
    metrics = Metrics()
    made = result(time_to_first_token=None, arrivals=[], output_token_count=0, queue_time=None)
    metrics.ended(REQUEST, made, Overloaded("full"))
    values = read(metrics)
    assert values['requests_total{endpoint="chat",outcome="error"}'] == 1
    assert values['errors_total{code="E2107"}'] == 1
    assert values["time_to_first_token_seconds_count"] == 0
    assert values["queue_time_seconds_count"] == 0


def test_unexpected_errors_and_rejections_are_counted_by_code() -> None:
    metrics = Metrics()
    metrics.ended(REQUEST, result(), KeyError("x"))
    metrics.refused("chat", PromptTooLong("long"))
    values = read(metrics)
    assert values['errors_total{code="E2100"}'] == 1
    assert values['errors_total{code="E1002"}'] == 1


@pytest.mark.parametrize("error", [Overloaded("x"), GeneratorExit()])
def test_disconnect_counts_as_cancelled_not_as_error(error: BaseException) -> None:
    metrics = Metrics()
    metrics.ended(REQUEST, result(cancelled=True), error)
    values = read(metrics)
    assert values["requests_cancelled_total"] == 1
    assert values['requests_total{endpoint="chat",outcome="cancelled"}'] == 1
    assert not any(name.startswith("errors_total{") for name in values)


def test_callback_gauges_are_read_on_export() -> None:
    metrics = Metrics()
    metrics.refused("/predictions", Overloaded("full"))
    state = {"running": 3.0, "restarts": 0.0}
    metrics.register_gauge("requests_running", "Running", lambda: state["running"])
    metrics.register_counter("engine_restarts", "Restarts", lambda: state["restarts"])
    state["restarts"] = 2
    values = read(metrics)
    assert (values["requests_running"], values["engine_restarts_total"]) == (3, 2)
    assert {"process_resident_memory_bytes", "process_open_fds"} <= values.keys()
    assert not any("_created" in name for name in values)


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
