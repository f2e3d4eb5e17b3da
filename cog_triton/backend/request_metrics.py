"""Request count gauges on Triton's /metrics, under TensorRT-LLM's metric name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import triton_python_backend_utils as pb_utils

from cog_triton.engines.base import EngineStats

_INTERVAL_S = 0.02


class RequestMetrics:
    """Publishes a model's request counts on a thread: each costs a round trip to the server."""

    def __init__(self, args: Mapping[str, str], stats: Callable[[], EngineStats]) -> None:
        """`args` are those of the model's ``initialize``."""
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._stats = stats
        self._requests = pb_utils.MetricFamily(
            name="nv_trt_llm_request_metrics",
            description="TRT LLM request metrics",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._gauges = {
            name: self._requests.Metric(labels={**labels, "request_type": name})
            for name in ("active", "waiting", "max")
        }
        self._published: dict[str, int] = {}
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()
        self.publish()

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
            stats = self._stats()
            values = {"active": stats.active, "waiting": stats.waiting, "max": stats.max_batch_size}
            for name, value in values.items():
                if self._published.get(name) != value:
                    self._published[name] = value
                    self._gauges[name].set(value)
