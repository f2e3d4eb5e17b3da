"""Metrics buffer: keeps vLLM's measurements until ``vllm_model`` fetches them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.vllm.host_messages import (
    GAUGES,
    KV_CACHE_USAGE,
    PREFIX_HITS,
    PREFIX_QUERIES,
    MetricsEvent,
)

# Values kept of one histogram between two fetches.
_MAX_VALUES = 100_000


class MetricsBuffer:
    """Metrics buffer: sums counters, keeps the last value of gauges and all of histograms.

    Nothing is kept before the first `take`.
    """

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._enabled = False

    def record(self, measurements: Mapping[str, Sequence[float]]) -> None:
        """Add the measurements of one engine step."""
        if not self._enabled:
            return
        for name, values in measurements.items():
            kept = self._values[name]
            if name in GAUGES:
                kept[:] = values
            elif name.endswith("_total"):
                kept[:] = [sum(kept) + sum(values)]
            elif len(kept) < _MAX_VALUES:
                kept.extend(values)

    def take(self) -> MetricsEvent:
        """Remove and return everything recorded since the last call."""
        self._enabled = True
        values, self._values = self._values, defaultdict(list)
        return MetricsEvent({name: kept for name, kept in values.items() if kept})


class KVCacheMonitor:
    """KV cache monitor: vLLM's scheduler statistics in the form that all families have."""

    def __init__(self) -> None:
        self._usage = 0.0
        self._queries = self._hits = 0

    def record(self, measurements: Mapping[str, Sequence[float]]) -> None:
        """Take what the measurements of one engine step say of the KV cache."""
        if KV_CACHE_USAGE in measurements:
            self._usage = measurements[KV_CACHE_USAGE][-1]
            self._queries += int(sum(measurements.get(PREFIX_QUERIES, ())))
            self._hits += int(sum(measurements.get(PREFIX_HITS, ())))

    def stats(self, block_size: int | None, blocks: int | None, *, idle: bool) -> KVCacheStats:
        """The statistics now; `idle` is that no request is left.

        After a cancellation vLLM says nothing more until its next step.
        """
        usage = 0.0 if idle else self._usage
        return KVCacheStats(usage, block_size, blocks, self._queries, self._hits)
