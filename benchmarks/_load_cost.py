"""Load on a server, and its CPU cost in each part of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import _load
import _resource_usage
from _servers import PREDICTIONS, Api, Server

PARTS = ("door", "server", "cog", "worker", "tritonserver", "stubs")
COSTS = ("door", "server", "cog", "worker", "triton", "stubs")
"""Columns of `LoadCost.costs`, beside a column of the whole."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    """A wave and the CPU seconds that each part of the server used meanwhile."""

    wave: _load.Wave
    cpu: Mapping[str, float]

    @property
    def us(self) -> float:
        """CPU microseconds a token, without the load client; at least one clock tick in all."""
        return _load.us_each(max(sum(self.cpu.values()), _resource_usage.TICK_S), self.wave.tokens)

    def costs(self) -> list[float]:
        """CPU microseconds a token of each of `PARTS`; supervisors are left out."""
        sums = dict.fromkeys(PARTS, 0.0)
        for part, seconds in self.cpu.items():
            name = "stubs" if part.startswith("stub ") else part
            if name in sums:
                sums[name] += seconds
        return [_load.us_each(seconds, self.wave.tokens) for seconds in sums.values()]

    @property
    def client(self) -> str:
        """The load client's own CPU: us a token, share of a core, lag of its event loop."""
        wave = self.wave
        return f"{wave.client_us:.0f} us {wave.client_busy:.0%} {wave.client_lag_ms:.0f} ms"


def measure(
    server: Server,
    inputs: Mapping[str, Any],
    streams: int,
    seconds: float = 0.0,
    api: Api = PREDICTIONS,
    **how: Any,
) -> LoadCost:
    """Run `_load.wave` and measure the server's CPU, that of failed requests included."""
    before = server.cpu_seconds()
    wave = _load.wave(server.base(api), inputs, streams, seconds, api=api, **how)
    return LoadCost(wave, _resource_usage.spent(before, server.cpu_seconds()))


def busy_notes(cells: Mapping[str, Sequence[LoadCost]]) -> list[str]:
    """A note for each load in which the client was the bottleneck."""
    waves = {
        name: max(found, key=lambda cell: cell.wave.client_busy) for name, found in cells.items()
    }
    return list(_load.busy_notes({name: cell.wave for name, cell in waves.items()}))
