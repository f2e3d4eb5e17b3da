"""Prometheus histogram with batched observation: one bisection a value, one lock a batch."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class BatchHistogram(Collector):
    """Histogram over ascending upper bounds, `buckets`."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name, self._help = name, help_text
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe_many(self, values: Iterable[tuple[float, int]]) -> None:
        """Observe (value, count) pairs: each value so many times."""
        bounds = self._bounds
        found = [(bisect_left(bounds, value), value, count) for value, count in values]
        with self._lock:
            for place, value, count in found:
                self._counts[place] += count
                self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        with self._lock:
            totals, total = list(itertools.accumulate(self._counts)), self._sum
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, totals, strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=total)
