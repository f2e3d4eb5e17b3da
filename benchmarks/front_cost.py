"""Cost of the front: predictions through it, and from Cog's private port beside them.

Both ways lead to one server, in turn. Prints the CPU time that the front adds for each token, and
what it adds to the time to the first one.

    .venv/bin/python benchmarks/front_cost.py
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

from _load_cost import LoadCost, busy_notes, measure
from _report import Figure, Grid, Report, Target, main, say
from _servers import Server, mock_server

from cog_triton.system import reaper

STREAMS, TPS = 64, 100
ALONE = 40
FRONT, DIRECT = "through the front", "Cog's private port"


def run(args: argparse.Namespace) -> Report:
    """Measure both ways, in turn, under load and with one stream at a time."""
    rounds, seconds, alone = (1, 0.3, 3) if args.quick else (args.rounds, args.seconds, ALONE)
    inputs = {"tps": TPS, "n_output_tokens": max(2, round(TPS * seconds))}
    report = Report("front_cost", "what the front costs")
    loaded: dict[str, list[LoadCost]] = {FRONT: [], DIRECT: []}
    single: dict[str, list[float]] = {FRONT: [], DIRECT: []}
    with mock_server() as server:
        ways = {FRONT: server, DIRECT: dataclasses.replace(server, url=private_url(server))}
        measure(server, {"max_tokens": 8}, 8)  # warms up
        for _ in range(rounds):
            for name, way in ways.items():
                cell = measure(way, inputs, STREAMS)
                loaded[name].append(cell)
                say(f"{STREAMS} x {TPS}, {name}: {cell.us:.1f} us/token")
        for _ in range(alone):
            for name, way in ways.items():
                wave = measure(way, {"tps": TPS, "n_output_tokens": 2}, 1).wave
                single[name].append(wave.ttft_ms(50))
    columns = ("", "us/token", "TTFT ms: p50", "p99", "one stream: p50")
    grid = Grid(f"{STREAMS} streams x {TPS} tok/s, and one after the other", columns)
    for name, cells in loaded.items():
        waves = [cell.wave for cell in cells]
        grid.add(
            name,
            statistics.median(cell.us for cell in cells),
            statistics.median(wave.ttft_ms(50) for wave in waves),
            statistics.median(wave.ttft_ms(99) for wave in waves),
            f"{statistics.median(single[name]):.2f}",
        )
    report.grids.append(grid)
    added = statistics.median(single[FRONT]) - statistics.median(single[DIRECT])
    total = [statistics.median(cell.us for cell in loaded[way]) for way in (FRONT, DIRECT)]
    report.figures += [
        Figure("CPU that the front adds for a token", total[0] - total[1], "us", Target(10)),
        Figure("CPU of all: through the front / direct", total[0] / total[1]),
        Figure("TTFT of one stream that the front adds", added, "ms", Target(0.3)),
        Figure(
            "TTFT of one stream: through the front / direct",
            statistics.median(single[FRONT]) / statistics.median(single[DIRECT]),
        ),
    ]
    report.notes += busy_notes(loaded)
    return report


def private_url(server: Server) -> str:
    """Where Cog listens, by its environment."""
    (port,) = set(private_ports(server.pid))
    return f"http://127.0.0.1:{port}"


def private_ports(root: int) -> Iterator[int]:
    for pid in reaper.descendants(root):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"cog.server.http" in words:
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if line.startswith(b"PORT="):
                    yield int(line[5:])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5, help="of each load")
    parser.add_argument("--rounds", type=int, default=3, help="of both ways")


if __name__ == "__main__":
    main("front_cost", __doc__, run, arguments)
