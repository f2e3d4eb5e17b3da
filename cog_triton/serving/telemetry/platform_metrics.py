"""Model server metrics under vLLM's names, which platforms read to route and to scale.

Those of the Gateway API Inference Extension's model server protocol, with which llm-d and KServe
pick an endpoint, and metrics of the KV cache and of memory under names of our own; and Triton's.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.errors import TritonUnavailable

_PERIOD_S = 10.0
_TIMEOUT_S = 1.0
_MAX_AGE_S = 0.1
_ERROR_AGE_S = 1.0
_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


def labelled(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    help_text: str,
    labels: Mapping[str, str],
    value: float,
) -> Metric:
    """A metric of one series, with these labels."""
    family = kind(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


class PlatformMetrics(Collector):
    """Model server metrics of one model; all are read when the metrics are.

    What the engine does not tell is left out.
    """

    def __init__(
        self,
        model_name: str,
        running: Callable[[], int],
        waiting: Callable[[], int],
        kv_cache: Callable[[], KVCacheStats | None],
    ) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache

    def collect(self) -> Iterable[Metric]:
        yield self._gauge("num_requests_running", "Requests the engine has", self._running())
        yield self._gauge("num_requests_waiting", "Requests that wait", self._waiting())
        cache = self._kv_cache()
        if cache is None:
            return
        usage = "Used share of the KV cache, from 0 to 1"
        yield GaugeMetricFamily("cog_triton_kv_cache_usage_ratio", usage, cache.usage)
        yield self._gauge("kv_cache_usage_perc", usage, cache.usage)
        yield self._cache_config(cache)
        for name, help_text, total in (
            ("queries", "Prompt tokens looked up in the KV cache", cache.prefix_queries),
            ("hits", "Prompt tokens found in the KV cache", cache.prefix_hits),
        ):
            if total is not None:
                name = f"prefix_cache_{name}"
                yield CounterMetricFamily(f"cog_triton_{name}", help_text, total)
                yield labelled(CounterMetricFamily, f"vllm:{name}", help_text, self._labels, total)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        return labelled(GaugeMetricFamily, f"vllm:{name}", help_text, self._labels, value)

    def _cache_config(self, cache: KVCacheStats) -> Metric:
        sizes = {"block_size": cache.block_size, "num_gpu_blocks": cache.blocks}
        labels = {name: str(size) for name, size in sizes.items() if size is not None}
        help_text = "KV cache: its blocks, and tokens a block"
        info = "vllm:cache_config_info"
        return labelled(GaugeMetricFamily, info, help_text, {**labels, **self._labels}, 1)


class LoRARequests(Collector):
    """Gauge ``vllm:lora_requests_info``: the adapters of now as labels; absent until `set`."""

    def __init__(self) -> None:
        self._state: tuple[dict[str, str], float] | None = None

    def set(self, max_lora: int, running: Collection[str], waiting: Collection[str]) -> None:
        """Set the adapters that requests run with, and wait for; at most `max_lora` run at once."""
        names = (",".join(sorted(set(adapters))) for adapters in (running, waiting))
        self._state = dict(zip(_LORA_LABELS, (str(max_lora), *names), strict=True)), time.time()

    def collect(self) -> Iterable[Metric]:
        if self._state is None:
            return
        labels, changed = self._state
        help_text = "LoRA adapters of running and waiting requests; when they were last set"
        yield labelled(GaugeMetricFamily, "vllm:lora_requests_info", help_text, labels, changed)


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
