"""vLLM metrics on Triton's metrics port, under vllm_backend's names."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.engines.vllm.host_messages import (
    GAUGES,
    KV_CACHE_USAGE,
    PREFIX_HITS,
    PREFIX_QUERIES,
    MetricsEvent,
    MetricsRequest,
)
from cog_triton.errors import TritonUnavailable

_log = logging.getLogger(__name__)

_PERIOD_S = 0.25
_TTFT_BUCKETS = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
]
_TPOT_BUCKETS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
_LATENCY_BUCKETS = [1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0]
_COUNT_BUCKETS = [1, 2, 5, 10, 20]
_COUNTERS = {
    "vllm:prompt_tokens_total": "Number of prefill tokens processed.",
    "vllm:generation_tokens_total": "Number of generation tokens processed.",
    # vllm_backend has neither these nor gauges; names and meanings are those of vLLM's own server.
    PREFIX_QUERIES: "Prefix cache queries, in terms of number of queried tokens.",
    PREFIX_HITS: "Prefix cache hits, in terms of number of cached tokens.",
}
_GAUGES = dict(
    zip(
        GAUGES,
        (
            "Number of requests in model execution batches.",
            "Number of requests waiting to be processed.",
            "KV-cache usage. 1 means 100 percent usage.",
        ),
        strict=True,
    )
)
# Buckets are those of vllm_backend (src/utils/metrics.py); None is 1-2-5 up to max_model_len.
_HISTOGRAMS: Mapping[str, tuple[str, list[float] | list[int] | None]] = {
    "vllm:time_to_first_token_seconds": (
        "Histogram of time to first token in seconds.",
        _TTFT_BUCKETS,
    ),
    "vllm:time_per_output_token_seconds": (
        "Histogram of time per output token in seconds.",
        _TPOT_BUCKETS,
    ),
    "vllm:e2e_request_latency_seconds": (
        "Histogram of end to end request latency in seconds.",
        _LATENCY_BUCKETS,
    ),
    "vllm:request_prompt_tokens": ("Number of prefill tokens processed.", None),
    "vllm:request_generation_tokens": ("Number of generation tokens processed.", None),
    "vllm:request_params_best_of": ("Histogram of the best_of request parameter.", _COUNT_BUCKETS),
    "vllm:request_params_n": ("Histogram of the n request parameter.", _COUNT_BUCKETS),
}
Fetch = Callable[[MetricsRequest, Callable[[Mapping[int, Any]], None]], None]
"""Asks every engine; the answers come together, by the number of the engine."""


def start_publisher(
    labels: Mapping[str, str], max_model_len: int, fetch: Fetch
) -> MetricsPublisher | None:
    """Start to publish; returns None where Triton runs without metrics."""
    try:
        return MetricsPublisher(labels, max_model_len, fetch)
    except pb_utils.TritonModelException as error:
        if "metrics not supported" not in str(error):
            raise
        _log.info("vllm_model: Triton reports no metrics, so vLLM's are not either")
        return None


class MetricsPublisher:
    """Metrics publisher: fetches new values from the host four times a second."""

    def __init__(self, labels: Mapping[str, str], max_model_len: int, fetch: Fetch) -> None:
        kinds = pb_utils.MetricFamily
        self._families: list[Any] = []  # a metric lives as long as its family
        self._add: dict[str, Callable[[float], None]] = {}

        def add(kind: Any, method: str, name: str, description: str, **more: Any) -> None:
            family = kinds(name=name, description=description, kind=kind)
            self._families.append(family)
            self._add[name] = getattr(family.Metric(labels=dict(labels), **more), method)

        for name, description in _COUNTERS.items():
            add(kinds.COUNTER, "increment", name, description)
        for name, description in _GAUGES.items():
            add(kinds.GAUGE, "set", name, description)
        for name, (description, buckets) in _HISTOGRAMS.items():
            limits = [float(limit) for limit in buckets or one_two_five(max_model_len)]
            add(kinds.HISTOGRAM, "observe", name, description, buckets=limits)
        self._fetch = fetch
        self._arrived = threading.Event()
        self._events: Mapping[int, Any] = {}
        self._gauges: dict[int, dict[str, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop publishing."""
        self._closing.set()
        self._arrived.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD_S):
            self._arrived.clear()
            try:
                self._fetch(MetricsRequest(), self._receive)
            except TritonUnavailable:
                continue
            self._arrived.wait()
            self._publish(
                {n: one for n, one in self._events.items() if isinstance(one, MetricsEvent)}
            )

    def _receive(self, events: Mapping[int, Any]) -> None:
        self._events = events
        self._arrived.set()

    def _publish(self, events: Mapping[int, MetricsEvent]) -> None:
        """Add what all engines tell; gauges are sums, and of the KV cache the mean."""
        told = self._gauges = {number: self._gauges.get(number, {}) for number in events}
        fresh = set()
        for number, event in events.items():
            for name, values in event.values.items():
                if name in _GAUGES:
                    told[number][name] = values[-1]
                    fresh.add(name)
                    continue
                for value in values:
                    self._add[name](value)
        for name in fresh:
            known = [gauges[name] for gauges in told.values() if name in gauges]
            self._add[name](sum(known) / (len(known) if name == KV_CACHE_USAGE else 1))


def one_two_five(highest: int) -> list[int]:
    """Histogram buckets 1, 2, 5, 10, 20, 50, and so on up to `highest`."""
    powers = (10**exponent for exponent in range(len(str(highest))))
    return [step * power for power in powers for step in (1, 2, 5) if step * power <= highest]
