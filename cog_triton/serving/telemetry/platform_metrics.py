"""Model server metrics under vLLM's names, which platforms read to route and to scale.

Those of the Gateway API Inference Extension's model server protocol, with which llm-d and KServe
pick an endpoint, and metrics of the KV cache and of memory under names of our own; and Triton's.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.errors import TritonUnavailable
from cog_triton.serving.adapter_store import AdapterUse

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
        sizes = {"block_size": cache.block_size, "num_gpu_blocks": cache.blocks}
        labels = {name: str(size) for name, size in sizes.items() if size is not None}
        info, text = "vllm:cache_config_info", "KV cache: its blocks, and tokens a block"
        yield labelled(GaugeMetricFamily, info, text, {**labels, **self._labels}, 1)
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


class LoRARequests(Collector):
    """Gauge ``vllm:lora_requests_info``: the adapters of now as labels, and when they changed."""

    def __init__(self, max_lora: int, use: AdapterUse) -> None:
        """At most `max_lora` adapters run at once."""
        self._max_lora, self._use = str(max_lora), use

    def collect(self) -> Iterable[Metric]:
        names = (",".join(sorted(adapters)) for adapters in self._use.adapters())
        labels = dict(zip(_LORA_LABELS, (self._max_lora, *names), strict=True))
        help_text = "LoRA adapters of running and waiting requests; when they were last set"
        name, changed = "vllm:lora_requests_info", self._use.changed
        yield labelled(GaugeMetricFamily, name, help_text, labels, changed)


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
        self._address = host, port
        self._lock = threading.Lock()
        self._text, self._error = b"", ""
        self._expires = 0.0

    def text(self) -> bytes:
        """The metrics, no older than 0.1 s; raises E2105, for a second without asking again.

        Scrapes come up to 20 times a second, and a Triton that hangs must not hold them all up.
        """
        with self._lock:
            if time.monotonic() >= self._expires:
                try:
                    self._text, self._error, age = self._fetch(), "", _MAX_AGE_S
                except TritonUnavailable as error:
                    self._error, age = error.detail, _ERROR_AGE_S
                self._expires = time.monotonic() + age
            if self._error:
                raise TritonUnavailable(self._error)
            return self._text

    def kv_cache(self) -> KVCacheStats | None:
        """The engine's KV cache; None where it tells nothing, or Triton does not answer."""
        try:
            return KVCacheStats.from_metrics(self.text().decode("utf-8", "replace"))
        except TritonUnavailable:
            return None

    def _fetch(self) -> bytes:
        connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise TritonUnavailable(f"Triton's metrics: {type(error).__name__}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise TritonUnavailable(f"Triton's metrics: status {response.status}")
        return text
