"""Streams at a fixed rate: whether each arrives at the rate its tokens are generated at.

All streams begin at once, as predictions or as chat completions (/v1). Prints the mean rate of a
stream from sending to its end, gaps between tokens, times to the first one, and CPU a token, beside
what the mock engine is told to do.

    .venv/bin/python benchmarks/fixed_rate.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import _servers
from _load_cost import COSTS, INCLUDED, QUICK_ACKS, LoadCost, busy_notes, measure
from _report import Figure, Grid, Report, Target, main, say
from _streams import CHAT, PREDICTIONS, Api

STREAMS_A_SECOND = Target(97, least=True)
EVEN = {50: Target(1.1), 99: Target(2)}
"""ITL over what is made, by percentile."""
CHEAP = {CHAT.name: Target(40), PREDICTIONS.name: Target(110)}
"""CPU us/token of all server processes, where the engine makes a step for all streams."""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams at `tps` tokens/s each; `clock` is the mock's."""

    tps: int
    streams: int
    api: Api = PREDICTIONS
    plain: bool = False
    clock: str = ""

    def named(self, clock: str) -> str:
        """In words; `clock` is the one that needs none."""
        name = f"{self.streams} x {self.tps}"
        name += f", {self.api.name}" if self.api is not PREDICTIONS else ""
        name += ", plain client" if self.plain else ""
        return name if self.clock == clock else f"{name}, {self.clock}"


LOADS = (
    Load(40, 64),
    Load(40, 64, CHAT),
    Load(40, 256, CHAT),
    Load(44, 24),
    Load(44, 24, plain=True),
    Load(100, 24),
    Load(100, 64),
    Load(100, 64, plain=True),
    Load(100, 64, CHAT),
)
DENSE = [load for load in LOADS if (load.tps, load.streams, load.plain) == (100, 64, False)]
EVENLY = [load for load in LOADS if load.tps == 40]
"""Loads with targets: of CPU, and of ITL."""


def loads(clock: str) -> list[Load]:
    """All loads of `clock`, and those of the CPU targets with free clocks, too."""
    chosen = [replace(load, clock=clock) for load in LOADS]
    if clock != _servers.FREE_CLOCKS:
        chosen += [replace(load, clock=_servers.FREE_CLOCKS) for load in DENSE]
    return chosen


def figures(load: Load, cell: LoadCost, clock: str) -> Iterator[Figure]:
    """What a load's targets are for; free clocks beside a step clock have none."""
    name, wave, made = load.named(clock), cell.wave, 1000 / load.tps
    kind = replace(load, clock="")
    aimed = load.clock == clock
    mean = statistics.mean(stream.tokens_per_second for stream in wave.streams)
    delivered = STREAMS_A_SECOND if kind in DENSE and kind.api is PREDICTIONS and aimed else None
    yield Figure(f"{name}: mean rate of a stream", mean, "tok/s", delivered)
    for percentile, target in EVEN.items():
        if kind in EVENLY or percentile == 99:
            ratio = wave.itl_ms(percentile) / made
            even = target if kind in EVENLY else None
            yield Figure(f"{name}: p{percentile} ITL / made", ratio, "x", even)
    yield Figure(f"{name}: median TTFT beyond what is made", wave.ttft_ms() - made, "ms")
    if kind in DENSE:
        cheap = CHEAP[load.api.name] if load.clock == _servers.STEP_CLOCK else None
        yield Figure(f"{name}: CPU of all server processes", cell.us, "us/token", cheap)


def run(args: argparse.Namespace) -> Report:
    """Measure every load, one after another; each rate and clock has a server."""
    seconds, chosen = args.seconds, loads(args.clock)
    if args.quick:
        seconds, chosen = 0.3, [replace(load, streams=2) for load in chosen[:2]]
    report = Report("fixed_rate", "streams at a set rate")
    columns: tuple[str, ...] = ("streams x tok/s", "a stream's", "slowest")
    columns += ("ITL ms: p50", "p99", "made", "TTFT ms: p50", "p99")
    columns += ("CPU us/token", *COSTS, "load client")
    grid = Grid("fixed rate: measured beside what is made", columns)
    cells: dict[str, list[LoadCost]] = {}
    for (clock, tps), same in itertools.groupby(chosen, lambda load: (load.clock, load.tps)):
        with _servers.mock_server(tps=tps, clock=clock) as server:
            for api in (PREDICTIONS, CHAT):
                measure(server, {"max_tokens": 8}, 8, api=api)  # warms up
            for load in same:
                inputs = {"max_tokens": max(2, round(tps * seconds))}
                cell = measure(server, inputs, load.streams, api=load.api, plain=load.plain)
                wave, name = cell.wave, load.named(args.clock)
                rates = [stream.tokens_per_second for stream in wave.streams]
                say(f"{name}: {statistics.mean(rates):.2f} tok/s")
                cells[name] = [cell]
                grid.add(
                    *(name, f"{statistics.mean(rates):.2f}", f"{min(rates):.2f}"),
                    *(wave.itl_ms(50), wave.itl_ms(99), 1000 / tps),
                    *(wave.ttft_ms(50), wave.ttft_ms(99)),
                    *(cell.us, *cell.costs(), cell.client),
                )
                report.figures += figures(load, cell, args.clock)
    report.grids.append(grid)
    report.notes += [INCLUDED, QUICK_ACKS, f"clocks of the mock, unless named: {args.clock}"]
    report.notes += busy_notes(cells)
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5, help="of each load")
    _servers.add_clock(parser)


if __name__ == "__main__":
    main("fixed_rate", __doc__, run, arguments)
