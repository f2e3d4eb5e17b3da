"""Metrics of engine processes' memory, and Triton's: over one connection, kept for a moment."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.errors import TritonUnavailable

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


_TIMEOUT_S = 1.0
_MAX_AGE_S = 0.1
_ERROR_AGE_S = 1.0


class TritonMetrics:
    """Client of Triton's metrics port; thread-safe."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        self._lock = threading.Lock()
        self._text = b""
        self._error: TritonUnavailable | None = None
        self._expires = 0.0

    def text(self) -> bytes:
        """The metrics, no older than 0.1 s; raises E2105, for a second without asking again.

        Scrapes come up to 20 times a second, and a Triton that hangs must not hold them all up.
        """
        with self._lock:
            if time.monotonic() >= self._expires:
                self._update()
            if self._error is not None:
                raise TritonUnavailable(self._error.detail)
            return self._text

    def kv_cache(self) -> KVCacheStats | None:
        """The engine's KV cache; None where it tells nothing, or Triton does not answer."""
        try:
            return KVCacheStats.from_metrics(self.text().decode("utf-8", "replace"))
        except TritonUnavailable:
            return None

    def close(self) -> None:
        """Close the connection; the next use opens one again."""
        with self._lock:
            self._connection.close()

    def _update(self) -> None:
        try:
            self._text, self._error = self._fetch(), None
        except TritonUnavailable as error:
            self._error = error
        age = _ERROR_AGE_S if self._error else _MAX_AGE_S
        self._expires = time.monotonic() + age

    def _fetch(self) -> bytes:
        kept = self._connection.sock is not None
        try:
            return self._get()
        except (OSError, http.client.HTTPException) as error:
            if not kept:
                raise _unavailable(error) from error
        try:
            return self._get()  # Triton may have closed the kept connection
        except (OSError, http.client.HTTPException) as error:
            raise _unavailable(error) from error

    def _get(self) -> bytes:
        try:
            self._connection.request("GET", "/metrics")
            response = self._connection.getresponse()
            text = response.read()
        except BaseException:
            self._connection.close()
            raise
        if response.status != http.client.OK:
            raise TritonUnavailable(f"Triton's metrics: status {response.status}")
        return text


def _unavailable(error: Exception) -> TritonUnavailable:
    return TritonUnavailable(f"Triton's metrics: {type(error).__name__}")
