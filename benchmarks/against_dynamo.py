"""Cost of a token, ITL and TTFT beside NVIDIA Dynamo's front end and mocker.

Both serve chat completions of one tokenizer, get the same requests, and take turns within one run:
streams at a set rate, and flat out. scripts/setup-tools installs Dynamo; if that fails, only
ours is measured.

    .venv/bin/python benchmarks/against_dynamo.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import _dynamo
import _servers
from _load import Wave
from _load_cost import LoadCost, busy_notes, measure
from _report import Figure, Grid, Report, main, say
from _servers import Server
from _streams import CHAT

OURS, THEIRS = "ours", "Dynamo"
FRONT = ("server", "cog", "worker", "dynamo.frontend")
"""Parts that are a front end; Triton, or Dynamo's mocker, is behind it."""
RATES, STREAMS = (40, 100, 0), (32, 64)
FLAT_OUT, FLAT_OUT_S = 400, 1.5
"""Tokens of a stream that has no set rate, and for how many seconds users ask again."""
FULL = 64
"""Streams of the loads that have every ratio among the figures."""
Load = tuple[int, int]
"""Streams, and tokens per second of each; 0 for flat out."""


def named(load: Load) -> str:
    """A load in words."""
    streams, tps = load
    return f"{streams} x {tps}" if tps else f"{streams}, flat out"


def front_us(cell: LoadCost) -> float:
    """CPU microseconds a token of the front end's processes."""
    seconds = sum(cell.cpu.get(part, 0.0) for part in FRONT)
    return seconds / cell.wave.tokens * 1e6 if cell.wave.tokens else 0.0


@contextmanager
def sides(tps: float, clock: str, dynamo: bool) -> Iterator[dict[str, Server]]:
    """Servers to compare, at one rate of a stream; Dynamo's if it is installed."""
    with ExitStack() as stack:
        running = {OURS: stack.enter_context(_servers.mock_server(tps=tps, clock=clock))}
        if dynamo:
            running[THEIRS] = stack.enter_context(_dynamo.dynamo_server(tps))
        for server in running.values():
            measure(server, {"max_tokens": 8}, 8, api=CHAT)  # warms up
        yield running


def compare(args: argparse.Namespace, dynamo: bool) -> dict[Load, dict[str, list[LoadCost]]]:
    """Every load on every side, in turns."""
    found: dict[Load, dict[str, list[LoadCost]]] = {}
    rates, streams, rounds = (RATES[1:2], (2,), 1) if args.quick else (RATES, STREAMS, args.rounds)
    seconds = 0.3 if args.quick else args.seconds
    for tps in rates:
        tokens = max(2, round(tps * seconds)) if tps else FLAT_OUT
        with sides(tps, args.clock, dynamo) as running:
            for count, _, (name, server) in itertools.product(
                streams, range(rounds), running.items()
            ):
                load = (count, tps)
                again = 0 if tps or args.quick else FLAT_OUT_S
                asked = {"max_tokens": tokens}
                cell = measure(server, asked, count, again, CHAT, lenient=True, tokens=tokens)
                say(f"{named(load)}, {name}: {cell.us:.1f} us/token")
                found.setdefault(load, {}).setdefault(name, []).append(cell)
    return found


def tell(found: dict[Load, dict[str, list[LoadCost]]], report: Report) -> None:
    """Add the table, and figures of each load."""
    columns = ("streams", "side", "tok/s", "failed", "us/token", "front end", "behind it")
    columns += ("events", "ITL ms: p50", "p99", "TTFT ms: p50", "p99", "client")
    grid = Grid("chat completions, streams x tok/s", columns)
    for load, of in found.items():
        for name, cells in of.items():
            middle = sorted(cells, key=lambda cell: cell.us)[(len(cells) - 1) // 2]
            wave, front = middle.wave, front_us(middle)
            failures = [failure for cell in cells for failure in cell.wave.failures]
            if failures:
                report.notes.append(f"{named(load)}, {name}: {failures[0]:.200}")
            grid.add(
                *(named(load), name, wave.tokens_per_second, len(failures)),
                *(middle.us, front, middle.us - front, events(wave)),
                *(wave.itl_ms(50), wave.itl_ms(99)),
                *(wave.ttft_ms(50), wave.ttft_ms(99), middle.client),
            )
        cost = statistics.median(cell.us for cell in of[OURS])
        report.figures.append(Figure(f"CPU, {named(load)}", cost, "us/token"))
        report.figures += ratios(of, load)
        report.notes += busy_notes({f"{named(load)}, {name}": of[name] for name in of})
    report.grids.append(grid)


def events(wave: Wave) -> float:
    """Events of output for each token: less than 1 where some held more than one token."""
    return sum(sum(stream.counts) for stream in wave.streams) / max(1, wave.tokens)


def ratios(of: dict[str, list[LoadCost]], load: Load) -> Iterator[Figure]:
    """Ours beside Dynamo's, round by round; none where either brought nothing."""
    pairs = zip(of[OURS], of.get(THEIRS, []), strict=False)
    whole = [(ours, its) for ours, its in pairs if ours.wave.tokens and its.wave.tokens]
    values: dict[str, Callable[[LoadCost], float]] = {
        "CPU": lambda cell: cell.us,
        "CPU of the front end": front_us,
        "ITL p99": lambda cell: cell.wave.itl_ms(99),
        "TTFT p50": lambda cell: cell.wave.ttft_ms(50),
    }
    for name, value in list(values.items())[: None if load[0] == FULL else 1]:
        each = [value(ours) / value(its) for ours, its in whole if value(its)]
        if each:
            yield Figure(f"{name}, {named(load)}: ours / Dynamo's", statistics.median(each))


def run(args: argparse.Namespace) -> Report:
    """Measure both sides, or ours alone."""
    report = Report("against_dynamo", "beside NVIDIA Dynamo's front end and mocker")
    setup = Path(__file__).parents[1] / "scripts" / "setup-tools"
    dynamo = subprocess.run([setup]).returncode == 0
    if not dynamo:
        report.notes.append("Dynamo could not be installed, and is left out")
    tell(compare(args, dynamo), report)
    report.notes += [
        f"ours: server, Cog, worker, Triton and its stubs; clocks of the mock: {args.clock}",
        "us/token is CPU of all server processes, the front end in it; events are a token's",
        "Dynamo: dynamo.frontend and dynamo.mocker, whose engine makes a step for all streams",
        "the first token is made after a step by ours, at once by Dynamo's",
    ]
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=4, help="of each load at a set rate")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    _servers.add_clock(parser)


if __name__ == "__main__":
    main("against_dynamo", __doc__, run, arguments)
