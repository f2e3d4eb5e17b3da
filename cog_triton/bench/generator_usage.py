"""CPU usage and event-loop lag of a load generator process."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass

from cog_triton.bench.http_client import now

_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class GeneratorUsage:
    """Usage of one process: CPU seconds, wall seconds, and event-loop lags in seconds."""

    cpu: float
    wall: float
    lags: array[float]


class UsageMonitor:
    """Measures usage from `start` to `stop`; lag is that of a timer of 20 ms."""

    def __init__(self) -> None:
        self._lags = array("d")
        self._cpu = self._wall = self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring, within a running event loop."""
        self._cpu, self._wall = time.process_time(), now()
        self._arm()

    def stop(self) -> GeneratorUsage:
        """Stop measuring; returns the usage since `start`."""
        if self._timer is not None:
            self._timer.cancel()
        return GeneratorUsage(time.process_time() - self._cpu, now() - self._wall, self._lags)

    def _arm(self) -> None:
        self._due = now() + _PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._fire)

    def _fire(self) -> None:
        self._lags.append(max(0.0, now() - self._due))
        self._arm()
