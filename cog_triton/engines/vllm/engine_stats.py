"""vLLM's measurements, kept until somebody publishes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from cog_triton.engines.vllm.host_messages import GAUGES, MetricsEvent

# Values kept of one histogram between two requests for them: when more come, nobody asks.
_MOST = 100_000


class Recorder:
    """Counters are added up, gauges keep the last value, histograms all of them; empty until the
    first `take`.
    """

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._wanted = False

    def record(self, measurements: Mapping[str, Sequence[float]]) -> None:
        """Keep the measurements of one engine step."""
        if not self._wanted:
            return
        for name, values in measurements.items():
            kept = self._values[name]
            if name in GAUGES:
                kept[:] = values
            elif name.endswith("_total"):
                kept[:] = [sum(kept) + sum(values)]
            elif len(kept) < _MOST:
                kept.extend(values)

    def take(self) -> MetricsEvent:
        """What was recorded since the last time."""
        self._wanted = True
        values, self._values = self._values, defaultdict(list)
        return MetricsEvent({name: kept for name, kept in values.items() if kept})
