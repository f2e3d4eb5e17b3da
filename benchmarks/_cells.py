"""One load on one server, and what it cost each part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import _accounting
import _load
from _servers import Server

QUICK_ACKS = "the client acknowledges each read at once, unless plain: Cog by itself waits for that"
PARTS = ("cog", "worker", "tritonserver", "stubs")
COSTS = ("cog", "worker", "triton", "stubs")
"""Columns of `Cell.costs`, beside a column of the whole."""
INCLUDED = (
    "CPU is that of Cog, its worker, tritonserver and all stubs; the mock engine's own loop is in"
    " it, the load client is not"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A wave, and seconds of CPU of each of the server's parts meanwhile."""

    wave: _load.Wave
    cpu: Mapping[str, float]

    @property
    def us(self) -> float:
        """Microseconds of CPU for each token, but for the load client; of at least a tick."""
        return _load.us_each(max(sum(self.cpu.values()), _accounting.TICK_S), self.wave.tokens)

    def costs(self) -> list[float]:
        """The same for each of `PARTS`; what supervises is in neither."""
        sums = dict.fromkeys(PARTS, 0.0)
        for part, seconds in self.cpu.items():
            name = "stubs" if part.startswith("stub ") else part
            if name in sums:
                sums[name] += seconds
        return [_load.us_each(seconds, self.wave.tokens) for seconds in sums.values()]

    @property
    def client(self) -> str:
        """What the load client took itself: us a token, part of a core, lag of its loop."""
        wave = self.wave
        return f"{wave.client_us:.0f} us {wave.client_busy:.0%} {wave.client_lag_ms:.0f} ms"


def measure(
    server: Server,
    inputs: Mapping[str, Any],
    streams: int,
    seconds: float = 0.0,
    **how: Any,
) -> Cell:
    """`_load.wave`, `how` included, with the server's CPU; that of what failed counts, too."""
    before = server.cpu_seconds()
    wave = _load.wave(server.url, inputs, streams, seconds, **how)
    return Cell(wave, _accounting.spent(before, server.cpu_seconds()))


def busy_notes(cells: Mapping[str, Sequence[Cell]]) -> list[str]:
    """A remark for each load that the client was too slow for."""
    waves = {
        name: max(found, key=lambda cell: cell.wave.client_busy) for name, found in cells.items()
    }
    return list(_load.busy_notes({name: cell.wave for name, cell in waves.items()}))
