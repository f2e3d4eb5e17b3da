"""Metric of the host memory that engine processes hold, those at work and spares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PERIOD_S = 10.0


class EngineMemory(Collector):
    """Gauge of resident memory by state, ``leased`` or ``spare``.

    It walks through all processes, so it is measured once in ten seconds at most: an endpoint
    picker reads the metrics twenty times a second.
    """

    def __init__(self, measure: Callable[[], Mapping[str, int]]) -> None:
        self._measure = measure
        self._measured: Mapping[str, int] = {}
        self._next = 0.0

    def collect(self) -> Iterable[Metric]:
        if time.monotonic() >= self._next:
            self._measured = self._measure()
            self._next = time.monotonic() + _PERIOD_S
        gauge = GaugeMetricFamily(
            "cog_triton_engine_memory_bytes",
            "Resident host memory of engine processes: those at work, and spares",
            labels=["state"],
        )
        for state, held in self._measured.items():
            gauge.add_metric([state], held)
        yield gauge
