"""Request and KV cache metrics of a model, with a stand-in for Triton's Python-backend module."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from cog_triton.engines.base import EngineStats
from cog_triton.engines.kv_cache_stats import KVCacheStats

PATIENCE_S = 60
ARGS = {"model_name": "tensorrt_llm", "model_version": "1"}


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    values: dict[str, float]
    calls: int

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def Metric(self, labels: dict[str, str]) -> Any:  # noqa: N802
        model, kinds = labels["model"], [v for n, v in labels.items() if n.endswith("_type")]
        key = " ".join([self._name, *kinds, *([model] if model == "engine_steps" else [])])
        kind, values = self._kind, self.values
        assert labels["version"] == "1"
        assert model in ("tensorrt_llm", "engine_steps")
        assert key not in values
        values[key] = 0

        class Metric:
            def set(self, value: float) -> None:
                assert kind == "gauge"
                values[key] = value

            def increment(self, value: float) -> None:
                assert kind == "counter"
                assert value >= 0, "Triton's stub dies of it"
                values[key] += value

        return Metric()


@pytest.fixture
def metrics_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    stand_in = ModuleType("triton_python_backend_utils")
    monkeypatch.setattr(MetricFamily, "values", {}, raising=False)
    vars(stand_in)["MetricFamily"] = MetricFamily
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    name = "cog_triton.backend.request_metrics"
    sys.modules.pop(name, None)
    try:
        yield importlib.import_module(name).RequestMetrics
    finally:
        del sys.modules[name]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, MetricFamily.values
        time.sleep(0.005)


def test_counts_and_kv_cache_follow_the_engine(metrics_of: Callable[..., Any]) -> None:
    now = [EngineStats(0, 0, 4)]
    metrics = metrics_of(ARGS, lambda: now[0])
    values = MetricFamily.values
    try:
        assert values == {
            "nv_trt_llm_request_metrics active": 0,
            "nv_trt_llm_request_metrics waiting": 0,
            "nv_trt_llm_request_metrics max": 4,
            "nv_trt_llm_request_metrics active engine_steps": 0,
            "nv_trt_llm_request_metrics waiting engine_steps": 0,
            "nv_trt_llm_request_metrics max engine_steps": 4,
        }
        for used, queries, hits in ((512, 700, 320), (256, 800, 384)):
            cache = KVCacheStats(used / 1024, 16, 1024, queries, hits)
            now[0] = EngineStats(6, 2, 4, cache, 9)
            metrics.publish()
            until(lambda: values.get("cog_triton_prefix_cache_hits_total") == hits)  # noqa: B023
            blocks = {
                name.split()[1]: value for name, value in values.items() if "kv_cache_block" in name
            }
            assert blocks == cache.block_metrics()
            assert values["cog_triton_prefix_cache_queries_total"] == queries
            assert values["nv_trt_llm_request_metrics active"] == 6
            assert values["nv_trt_llm_request_metrics active engine_steps"] == 9
            assert values["nv_trt_llm_request_metrics waiting engine_steps"] == 5
    finally:
        metrics.close()


def test_counts_go_on_with_an_engine_that_counts_anew(metrics_of: Callable[..., Any]) -> None:
    now = [EngineStats(0, 0, 4, KVCacheStats(0.5, 16, 1024, 700, 320))]
    metrics = metrics_of(ARGS, lambda: now[0])
    values = MetricFamily.values
    try:
        for queries, hits, all_hits in ((0, 0, 320), (100, 30, 350), (150, 40, 360)):
            now[0] = EngineStats(0, 0, 4 + queries, KVCacheStats(0.5, 16, 1024, queries, hits))
            metrics.publish()
            until(lambda: values["nv_trt_llm_request_metrics max"] == 4 + queries)  # noqa: B023
            until(lambda: values["cog_triton_prefix_cache_hits_total"] == all_hits)  # noqa: B023
            assert values["cog_triton_prefix_cache_queries_total"] == 700 + queries
    finally:
        metrics.close()
