"""Whether the load generator keeps up: its share of a CPU, and how late its event loop runs."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass

from cog_triton.bench.http_client import now

_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class Load:
    """Of one process: seconds of CPU and of time, and the event loop's delays, in seconds."""

    cpu: float
    wall: float
    lags: array[float]


class Monitor:
    """Measures from `start` to `stop`, by a timer that should fire every 20 ms."""

    def __init__(self) -> None:
        self._lags = array("d")
        self._cpu = self._wall = self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, within a running loop."""
        self._cpu, self._wall = time.process_time(), now()
        self._arm()

    def stop(self) -> Load:
        """What was measured."""
        if self._timer is not None:
            self._timer.cancel()
        return Load(time.process_time() - self._cpu, now() - self._wall, self._lags)

    def _arm(self) -> None:
        self._due = now() + _PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._fire)

    def _fire(self) -> None:
        self._lags.append(max(0.0, now() - self._due))
        self._arm()
