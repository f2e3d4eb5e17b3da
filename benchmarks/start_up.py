"""Start-up time: from a server's start to its first token.

Cold unpacks the engine (or makes the mock's), warm finds it there; the files are in the page cache
in both.

    .venv/bin/python benchmarks/start_up.py [engine.tar]
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import _load
from _report import Figure, Grid, Report, main, say
from _servers import Server, server

MOCK = ("--engine", "mock", "--tps=0")


class Start(NamedTuple):
    """Times of one start in seconds, and CPU seconds of all processes until the first token."""

    ready: float
    first_token: float
    cpu: float


def start(running: AbstractContextManager[Server]) -> Start:
    """Start a server, ask for one token, and stop it."""
    with running as it:
        stream = _load.wave(it.url, {"prompt": "a", "max_tokens": 1}, 1).streams[0]
        first = stream.times[0] if stream.times else stream.ended
        cpu = sum(it.cpu_seconds().values())
        return Start(it.ready - it.started, first - it.started, cpu)


def run(args: argparse.Namespace) -> Report:
    """Measure every kind of start, in turns."""
    engines: dict[str, tuple[str, ...]] = {"mock": MOCK}
    if args.engine:
        engines["engine.tar"] = (str(args.engine),)
    found: dict[str, list[Start]] = {}
    for _ in range(1 if args.quick else args.rounds):
        for name, arguments_ in engines.items():
            with tempfile.TemporaryDirectory(prefix="cog-triton-bench-") as work_dir:
                for kind in ("cold", "warm"):
                    begun = start(server(*arguments_, work_dir=Path(work_dir)))
                    found.setdefault(f"{name}, {kind}", []).append(begun)
                    say(f"{name}, {kind}: {begun.first_token:.2f} s, {begun.cpu:.1f} of CPU")
    report = Report("start_up", "from start to first token")
    grid = Grid("seconds from the start", ("", "ready", "first token", "slowest", "CPU"))
    firsts: dict[str, float] = {}
    for name, starts in found.items():
        ready, firsts[name], cpu = map(median, zip(*starts, strict=True))
        slowest = max(one.first_token for one in starts)
        seconds = (ready, firsts[name], slowest, cpu)
        grid.add(name, *(f"{value:.2f}" for value in seconds))
        report.figures.append(Figure(f"first token, {name}", firsts[name], "s"))
    for name in engines:
        ratio = firsts[f"{name}, cold"] / firsts[f"{name}, warm"]
        report.figures.append(Figure(f"first token, {name}: cold / warm", ratio))
    report.grids.append(grid)
    report.notes.append("files are in the page cache in every row")
    report.notes.append("where CPU does not follow the seconds, something else ran on the machine")
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, nargs="?", help="engine.tar")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each kind")


if __name__ == "__main__":
    main("start_up", __doc__, run, arguments)
