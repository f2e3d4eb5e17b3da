"""Memory and CPU of a server under mixed load, by the memory allocator of its processes.

    .venv/bin/python benchmarks/allocators.py glibc glibc+MALLOC_ARENA_MAX=2 jemalloc=LIBRARY

LIBRARY is the path of an allocator that is preloaded into every process of a server; a plus is
followed by a setting of glibc's. Allocators take turns. Each part of the server is told by itself:
what an allocator would do to tritonserver alone is in that column.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from collections import defaultdict

import _memory_samples
import httpx
from _mixed_requests import PATIENCE_S
from _report import Grid, Report, main, say
from served import Server
from soak_mixed import MOCK, Load

PARTS = ("tritonserver", "stub ensemble", "stub engine_steps", "engine", "server", "cog")
_SETTLE_S = 3.0


def environment(allocator: str) -> tuple[str, dict[str, str]]:
    """Name of an allocator and the variables that choose it."""
    name, _, value = allocator.partition("=")
    if "+" in name:
        name, variable = name.split("+")
        return f"{name} {variable}={value}", {variable: value}
    return name, {"LD_PRELOAD": value} if value else {}


async def measure(server: Server, args: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """CPU milliseconds a request, and MB of each part after the load."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S, trust_env=False) as http:
        await server.until_ready(http)
        load = Load(server, http, await server.model(http), args)
        before = _memory_samples.take(server.process.pid, 0, 0, 0)
        began = time.monotonic()
        await load.run(1, 5 if args.quick else args.seconds)
        requests = sum(load.account.values())
        await asyncio.sleep(_SETTLE_S)
        after = _memory_samples.take(server.process.pid, time.monotonic() - began, requests, 0)
    lost = [outcome for _, outcome in load.account if outcome.startswith("LOST")]
    if lost:
        say(f"{len(lost)} requests failed: {lost[0]}")
    return (after.cpu - before.cpu) * 1000 / requests, {**after.megabytes, "requests": requests}


def run(args: argparse.Namespace) -> Report:
    """Measure all allocators in turns."""
    report = Report("allocators", "memory by allocator")
    found: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    for _ in range(1 if args.quick else args.rounds):
        for allocator in args.allocators:
            name, variables = environment(allocator)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work_dir:
                server = Server(work_dir, *MOCK, environment=variables)
                try:
                    found[name].append(asyncio.run(measure(server, args)))
                finally:
                    server.process.send_signal(signal.SIGTERM)
                    server.process.wait(60)
            cost, held = found[name][-1]
            say(f"{name}: {held['requests']:.0f} requests, {cost:.1f} ms of CPU each")
    grid = Grid("MB by allocator", ("", "ms of CPU a request", "requests", *PARTS))
    for name, rounds in found.items():
        cost = statistics.median(cost for cost, _ in rounds)
        held = [statistics.median(mb.get(p, 0) for _, mb in rounds) for p in ("requests", *PARTS)]
        grid.add(name, f"{cost:.1f}", f"{held[0]:.0f}", *(f"{mb:.1f}" for mb in held[1:]))
    report.grids.append(grid)
    report.notes.append("anonymous and shared memory of each process, some seconds after the load")
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("allocators", nargs="*", default=["glibc"], help="such as these; glibc")
    parser.add_argument("--seconds", type=float, default=120, help="of load; 120")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each; 2")
    parser.add_argument("--clients", type=int, default=24, help="at once; 24")
    parser.set_defaults(rate=0, burst=0, max_words=4000)


if __name__ == "__main__":
    main("allocators", __doc__, run, arguments)
