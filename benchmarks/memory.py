"""Memory a stream: of streams that wait for their next token, and of streams that run.

The memory of all of the server's processes with so many streams open, less that before, by the
number of streams: PSS, without files. The client is in another process, and does not count.

    .venv/bin/python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import _load
from _report import Figure, Grid, Report, main, say
from _servers import Server, mock_server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stack import wait_until

SMALL = 1.0
MB = 1e6
_ACTIVE = re.compile(r'^nv_trt_llm_request_metrics\{.*request_type="active".*\} (\d+)', re.M)
_OPEN_S = 60
_IDLE_TPS, _BUSY_TPS = 0.01, 44


def active(server: Server) -> int:
    """Number of streams in the engine, from Triton's metrics of each model that serves them."""
    with urlopen(f"{server.metrics}/metrics", timeout=10) as answer:
        return sum(map(int, _ACTIVE.findall(answer.read().decode())))


def until(server: Server, streams: int) -> None:
    """Wait for `streams` in the engine."""
    wait_until(lambda: active(server) == streams, _OPEN_S)


def total(memory: Mapping[str, int]) -> float:
    """Total MB of all parts."""
    return sum(memory.values()) / MB


def measure(
    server: Server, loads: Mapping[str, Mapping[str, Any]], args: argparse.Namespace
) -> dict[str, Mapping[str, int]]:
    """Measure memory before, under each load, and after."""
    streams, seconds = (4, 0.2) if args.quick else (args.streams, args.seconds)
    # What loads at the first is not a stream's.
    _load.wave(server.url, {"prompt": "a", "max_tokens": 8}, 1)
    found: dict[str, Mapping[str, int]] = {"before": server.memory_bytes()}
    context = multiprocessing.get_context("spawn")
    for kind, inputs in loads.items():
        given = (server.url, inputs, streams)
        client = context.Process(target=_load.wave, args=given, daemon=True)
        client.start()
        try:
            until(server, streams)
            time.sleep(seconds)
            found[kind] = server.memory_bytes()
            running = active(server)
        finally:
            client.terminate()
            client.join()
        if running != streams:
            raise SystemExit(f"{kind}: {running} of {streams} streams were left")
        until(server, 0)
        say(f"{kind}: {total(found[kind]):.0f} MB")
    found["after"] = server.memory_bytes()
    return found


def run(args: argparse.Namespace) -> Report:
    """Measure the mock with streams that wait, and that run."""
    report = Report("memory", "memory of streams")
    streams = 4 if args.quick else args.streams
    with mock_server() as server:
        idle, busy = ({"max_tokens": 100_000, "tps": tps} for tps in (_IDLE_TPS, _BUSY_TPS))
        found = measure(server, {"waiting": idle, "running": busy}, args)
    parts = sorted(found["before"])
    grid = Grid(f"MB, {streams} streams", ("", "all", *parts, "MB a stream"))
    for kind, memory in found.items():
        each = (total(memory) - total(found["before"])) / streams
        of = [f"{memory.get(part, 0) / MB:.1f}" for part in parts]
        grid.add(kind, f"{total(memory):.1f}", *of, f"{each:.3f}")
        if kind in ("waiting", "running"):
            report.figures.append(Figure(f"a stream that is {kind}", each, "MB", SMALL))
    report.grids.append(grid)
    report.notes.append("PSS of all processes without files: what they share counts once")
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5, help="open before it is looked")


if __name__ == "__main__":
    main("memory", __doc__, run, arguments)
