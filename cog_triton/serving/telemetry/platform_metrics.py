"""Model server metrics under vLLM's names, which platforms read to route and to scale.

Those of the Gateway API Inference Extension's model server protocol, with which llm-d and KServe
pick an endpoint, and KV cache metrics under names of our own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cog_triton.engines.kv_cache_stats import KVCacheStats

_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


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
                counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=list(self._labels))
                counter.add_metric(list(self._labels.values()), total)
                yield counter

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge

    def _cache_config(self, cache: KVCacheStats) -> Metric:
        sizes = {"block_size": cache.block_size, "num_gpu_blocks": cache.blocks}
        labels = {name: str(size) for name, size in sizes.items() if size is not None}
        labels |= self._labels
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV cache: its blocks, and tokens a block",
            labels=list(labels),
        )
        info.add_metric(list(labels.values()), 1)
        return info


class LoRARequests(Collector):
    """Gauge ``vllm:lora_requests_info``: the adapters of now as labels; absent until `set`."""

    def __init__(self) -> None:
        self._state: tuple[list[str], float] | None = None

    def set(self, max_lora: int, running: Collection[str], waiting: Collection[str]) -> None:
        """Set the adapters that requests run with, and wait for; at most `max_lora` run at once."""
        names = (",".join(sorted(set(adapters))) for adapters in (running, waiting))
        self._state = [str(max_lora), *names], time.time()

    def collect(self) -> Iterable[Metric]:
        if self._state is None:
            return
        labels, changed = self._state
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of running and waiting requests; when they were last set",
            labels=_LORA_LABELS,
        )
        info.add_metric(labels, changed)
        yield info
