"""ITL of streams at a fixed rate while other clients do what could disturb them.

Prompts of 100,000 tokens arrive, 64 clients stream from Triton itself, or one client reads nothing;
each in turn with undisturbed streams, as predictions and as chat completions (/v1).

    .venv/bin/python benchmarks/disturbed.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time

import _disturbances
import _servers
from _disturbances import Disturbance
from _load_cost import INCLUDED, QUICK_ACKS, LoadCost, busy_notes, measure
from _report import Figure, Grid, Report, Target, main, say
from _streams import CHAT, PREDICTIONS

STREAMS, TPS = 64, 40
CALM = Target(1.5)
UNDISTURBED, DEAF = "undisturbed", "a client that reads nothing"
KINDS: dict[str, Disturbance | None] = {
    UNDISTURBED: None,
    "100k-token prompts": _disturbances.long_prompts,
    "64 direct clients of Triton": _disturbances.direct_clients,
    DEAF: _disturbances.reads_nothing,
}
FULL_S = 8
"""Seconds after which the buffers to a client that reads nothing stand full."""


def run(args: argparse.Namespace) -> Report:
    """Measure every kind over both APIs, in turns."""
    streams, seconds, rounds = (2, 0.5, 1) if args.quick else (STREAMS, args.seconds, args.rounds)
    report = Report("disturbed", "streams beside clients that could disturb them")
    found: dict[str, dict[str, list[LoadCost]]] = {}
    tokens = round(TPS * seconds)
    with _servers.mock_server(tps=TPS, clock=args.clock) as server:
        for api in (PREDICTIONS, CHAT):
            measure(server, {"max_tokens": 8}, 8, api=api)  # warms up
        for _, api, (name, kind) in itertools.product(
            range(rounds), (CHAT, PREDICTIONS), KINDS.items()
        ):
            with _disturbances.disturbed(kind, server, api):
                time.sleep(FULL_S if name == DEAF and not args.quick else 0)
                cell = measure(
                    server, {"max_tokens": tokens}, streams, api=api, lenient=True, tokens=tokens
                )
            say(f"{api.name}, {name}: ITL p99 {cell.wave.itl_ms():.1f} ms")
            found.setdefault(api.name, {}).setdefault(name, []).append(cell)
    tell(found, report)
    report.notes += [INCLUDED, QUICK_ACKS, f"clocks of the mock: {args.clock}"]
    return report


def tell(found: dict[str, dict[str, list[LoadCost]]], report: Report) -> None:
    """Add the table, and p99 of each kind over that of its round without it."""
    columns = ("API", "beside", "a stream's tok/s", "failed", "ITL ms: p50", "p99", "p99.9")
    grid = Grid(f"{STREAMS} streams at {TPS} tok/s", (*columns, "TTFT ms: p50", "load client"))
    for api, kinds in found.items():
        for name, cells in kinds.items():
            middle = sorted(cells, key=lambda cell: cell.wave.itl_ms())[(len(cells) - 1) // 2]
            wave = middle.wave
            rates = [stream.tokens_per_second for stream in wave.streams]
            failures = [failure for cell in cells for failure in cell.wave.failures]
            report.notes += [f"{api}, {name}: {failure:.200}" for failure in failures[:1]]
            grid.add(
                *(api, name, f"{statistics.mean(rates or [0]):.2f}", len(failures)),
                *(wave.itl_ms(50), wave.itl_ms(99), wave.itl_ms(99.9)),
                *(wave.ttft_ms(50), middle.client),
            )
            if name != UNDISTURBED:
                pairs = zip(cells, kinds[UNDISTURBED], strict=True)
                grown = [over(cell, calm) for cell, calm in pairs if calm.wave.itl_ms()]
                title = f"ITL p99, {api}, {name} / undisturbed"
                value = statistics.median(grown) if grown else math.inf
                report.figures.append(Figure(title, value, "x", CALM))
        report.notes += busy_notes({f"{api}, {name}": cells for name, cells in kinds.items()})
    report.grids.append(grid)


def over(cell: LoadCost, calm: LoadCost) -> float:
    """ITL p99 over that of undisturbed streams; infinity where a stream failed."""
    return math.inf if cell.wave.failures else cell.wave.itl_ms() / calm.wave.itl_ms()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=4, help="of each turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each kind")
    _servers.add_clock(parser)


if __name__ == "__main__":
    main("disturbed", __doc__, run, arguments)
