"""vLLM metrics: the publisher, with a stand-in for Triton's Python-backend module."""

from __future__ import annotations

import importlib
import queue
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.vllm.engine_host import KVCacheMonitor, MetricsBuffer
from cog_triton.engines.vllm.host_messages import MetricsEvent
from cog_triton.errors import TritonUnavailable


class TritonModelException(Exception):
    pass


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    supported = True
    made: dict[str, list[float]]

    def __init__(self, name: str, description: str, kind: str) -> None:
        if not self.supported:
            raise TritonModelException("metrics not supported")
        self._name = name

    def Metric(self, labels: Any, buckets: Any = None) -> Any:  # noqa: N802
        self.made[self._name] = []

        class Metric:
            increment = set = observe = self.made[self._name].append

        return Metric


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    stand_in = ModuleType("triton_python_backend_utils")
    monkeypatch.setattr(MetricFamily, "made", {}, raising=False)
    monkeypatch.setattr(MetricFamily, "supported", True)
    vars(stand_in).update(
        MetricFamily=MetricFamily,
        TritonModelException=TritonModelException,
    )
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    name = "cog_triton.backend.vllm_metrics"
    sys.modules.pop(name, None)
    try:
        yield importlib.import_module(name).start_publisher
    finally:
        del sys.modules[name]


def test_no_publisher_where_triton_has_no_metrics(
    publisher: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cog_triton")
    MetricFamily.supported = False
    assert publisher({"model": "m"}, 100, lambda *_: None) is None
    assert "reports no metrics" in caplog.text


def test_every_value_is_published_under_its_metric(publisher: Callable[..., Any]) -> None:
    answers = queue.Queue[Any]()
    answers.put(None)  # the engine is still loading
    first = {
        "vllm:prompt_tokens_total": [5],
        "vllm:request_params_n": [1, 2],
        "vllm:kv_cache_usage_perc": [0.5],
    }
    answers.put({0: MetricsEvent(first)})
    others = {"vllm:kv_cache_usage_perc": [0.25], "vllm:num_requests_running": [2]}
    answers.put({0: MetricsEvent({}), 1: MetricsEvent(others)})  # another engine, and it is idle
    others = {"vllm:prompt_tokens_total": [3], "vllm:num_requests_running": [1]}
    answers.put({0: MetricsEvent(others), 1: MetricsEvent({"vllm:prompt_tokens_total": [4]})})
    done = queue.Queue[None]()

    def fetch(request: Any, emit: Callable[[Any], None]) -> None:
        if answers.empty():
            done.put(None)
            emit({0: MetricsEvent({})})
        elif (answer := answers.get()) is None:
            raise TritonUnavailable("the engine is still loading; try again later")
        else:
            emit(answer)

    running = publisher({"model": "m"}, 100, fetch)
    done.get(timeout=60)
    running.close()
    made = MetricFamily.made
    assert made.pop("vllm:prompt_tokens_total") == [5, 3, 4]
    assert made.pop("vllm:request_params_n") == [1, 2]
    assert made.pop("vllm:kv_cache_usage_perc") == [0.5, 0.375]
    assert made.pop("vllm:num_requests_running") == [2, 3]
    assert not any(made.values())
    assert len(made) == 10


def test_nothing_is_buffered_before_the_first_fetch() -> None:
    buffer = MetricsBuffer()
    buffer.record({"a_total": [3], "b": [1.0]})
    assert buffer.take().values == {}
    buffer.record({"a_total": [3], "b": [1.0]})
    buffer.record({"a_total": [4], "b": []})
    buffer.record({"vllm:num_requests_running": [2]})
    buffer.record({"vllm:num_requests_running": [0]})
    assert buffer.take().values == {
        "a_total": [7],
        "b": [1.0],
        "vllm:num_requests_running": [0],
    }
    assert buffer.take().values == {}


def test_an_idle_engine_uses_no_kv_cache_whatever_its_last_step_said() -> None:
    monitor = KVCacheMonitor()
    assert monitor.stats(16, None, idle=True) == KVCacheStats(0, 16, None, 0, 0)
    for _ in range(2):
        monitor.record(
            {
                "vllm:kv_cache_usage_perc": [0.5],
                "vllm:prefix_cache_queries_total": [7],
                "vllm:prefix_cache_hits_total": [3],
            }
        )
    monitor.record({"vllm:prompt_tokens_total": [7]})
    assert monitor.stats(16, 1024, idle=False) == KVCacheStats(0.5, 16, 1024, 14, 6)
    assert monitor.stats(16, 1024, idle=True) == KVCacheStats(0, 16, 1024, 14, 6)
