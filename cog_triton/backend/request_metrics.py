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


class RequestMetrics:
    """Publishes a model's statistics on a thread: each value costs a round trip to the server."""

    def __init__(self, args: Mapping[str, str], stats: Callable[[], EngineStats]) -> None:
        """`args` are those of the model's ``initialize``."""
        self._labels = {"model": args["model_name"], "version": args["model_version"]}
        self._stats = stats
        self._requests = _Family(
            pb_utils.MetricFamily.GAUGE, "nv_trt_llm_request_metrics", "TRT LLM request metrics"
        )
        self._blocks: _Family | None = None
        self._prefix: list[_Family] = []
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
                self._requests.set({**self._labels, "model": model, "request_type": name}, value)
        if (cache := stats.kv_cache) is None:
            return
        if self._blocks is None:
            self._blocks = _Family(
                pb_utils.MetricFamily.GAUGE, BLOCKS, "TRT LLM KV cache block metrics"
            )
        for name, count in cache.block_metrics().items():
            self._blocks.set({**self._labels, BLOCK_TYPE: name}, count)
        if cache.prefix_queries is None or cache.prefix_hits is None:
            return
        if not self._prefix:
            counter = pb_utils.MetricFamily.COUNTER
            self._prefix = [
                _Family(counter, PREFIX_QUERIES, "Prompt tokens looked up in the KV cache"),
                _Family(counter, PREFIX_HITS, "Prompt tokens found in the KV cache"),
            ]
        for family, total in zip(
            self._prefix, (cache.prefix_queries, cache.prefix_hits), strict=True
        ):
            family.set(self._labels, total)


class _Family:
    """Metric family that makes its metrics when they are first set."""

    def __init__(self, kind: Any, name: str, description: str) -> None:
        self._family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._counts = kind == pb_utils.MetricFamily.COUNTER
        self._metrics: dict[str, Any] = {}
        self._published: dict[str, float] = {}

    def set(self, labels: Mapping[str, str], value: float) -> None:
        """Set a gauge, or a counter; one that is lower than before counts for a new engine.

        Triton's stub would die of a negative increment.
        """
        key = str(labels)
        metric = self._metrics.get(key)
        if metric is None:
            metric = self._metrics[key] = self._family.Metric(labels=dict(labels))
            self._published[key] = 0.0
        before, self._published[key] = self._published[key], value
        if value == before:
            return
        if self._counts:
            metric.increment(value - before if value > before else value)
        else:
            metric.set(value)
