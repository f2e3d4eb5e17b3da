"""Request and KV cache metrics on Triton's /metrics, under TensorRT-LLM's metric names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.engines.base import EngineStats
from cog_triton.engines.generate_stream import STEP_MODEL
from cog_triton.engines.kv_cache_stats import BLOCK_TYPE, BLOCKS, PREFIX_HITS, PREFIX_QUERIES

_INTERVAL_S = 0.02
_REQUESTS = "nv_trt_llm_request_metrics"
_GAUGES = {_REQUESTS: "TRT LLM request metrics", BLOCKS: "TRT LLM KV cache block metrics"}
_COUNTERS = {
    PREFIX_QUERIES: "Prompt tokens looked up in the KV cache",
    PREFIX_HITS: "Prompt tokens found in the KV cache",
}


class RequestMetrics:
    """Publishes a model's statistics on a thread: each value costs a round trip to the server."""

    def __init__(self, args: Mapping[str, str], stats: Callable[[], EngineStats]) -> None:
        """`args` are those of the model's ``initialize``."""
        self._labels = {"model": args["model_name"], "version": args["model_version"]}
        self._stats = stats
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._published: dict[str, float] = {}
        self._changed = threading.Event()
        self._closing = False
        self._update()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Schedule an update."""
        self._changed.set()

    def close(self) -> None:
        """Stop the thread."""
        self._closing = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while self._changed.wait() and not self._closing:
            time.sleep(_INTERVAL_S)
            self._changed.clear()
            self._update()

    def _update(self) -> None:
        stats = self._stats()
        most, of_steps = stats.max_batch_size, stats.step_requests
        of_models = {
            self._labels["model"]: (stats.active, stats.waiting),
            STEP_MODEL: (of_steps, max(0, of_steps - most)),  # which itself only carries bytes
        }
        for model, (active, waiting) in of_models.items():
            for name, value in {"active": active, "waiting": waiting, "max": most}.items():
                self._set(_REQUESTS, value, model=model, request_type=name)
        if (cache := stats.kv_cache) is None:
            return
        for name, count in cache.block_metrics().items():
            self._set(BLOCKS, count, **{BLOCK_TYPE: name})
        if cache.prefix_queries is not None and cache.prefix_hits is not None:
            self._set(PREFIX_QUERIES, cache.prefix_queries)
            self._set(PREFIX_HITS, cache.prefix_hits)

    def _set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge, or a counter, which is made when it is first set."""
        counts = name in _COUNTERS
        if (family := self._families.get(name)) is None:
            kind = pb_utils.MetricFamily.COUNTER if counts else pb_utils.MetricFamily.GAUGE
            about = {**_GAUGES, **_COUNTERS}[name]
            family = pb_utils.MetricFamily(name=name, description=about, kind=kind)
            self._families[name] = family
        key = f"{name} {labels}"
        if key not in self._metrics:
            self._metrics[key] = family.Metric(labels={**self._labels, **labels})
        before, self._published[key] = self._published.get(key, 0.0), value
        if value == before:
            return
        if counts:
            # One that is lower than before counts for a new engine: Triton's stub would die of a
            # negative increment.
            self._metrics[key].increment(value - before if value > before else value)
        else:
            self._metrics[key].set(value)
