"""Profile of the hot path: CPU of a token and of a request by process, and what the server does.

The mock has a step clock. User and system time and wake-ups are those of /proc; what the server's
user time goes to is sampled by py-spy, where it is on PATH, in a wave of its own, as it costs.

    .venv/bin/python benchmarks/hot_path.py --write=docs/performance.md
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import _load
import _servers
from _report import Figure, Grid, Report, main, markdown_table, say, write_between
from _resource_usage import Use, tree, uses
from _servers import CHAT, PREDICTIONS, Api

TPS = 100
MARKS = "<!-- made by benchmarks/hot_path.py -->\n", "<!-- end -->"
PARTS = {
    "server": "server",
    "cog": ("cog", "worker"),
    "tritonserver": "tritonserver",
    "stubs": "stub ",
    "engine": "engine",
    "others": "",
}
"""Columns, each with how its parts' names begin; a part belongs to the first that fits."""
WHAT = {
    "JSON, events": ("json/encoder", "json/__init__", "openai/choices", "openai/envelope"),
    "text": ("cog_triton/text/", "frozen codecs"),
    "steps": ("cog_triton/triton/", "cog_triton/engines/"),
    "generations": ("serving/gener", "serving/resume", "serving/admission", "openai/sequences"),
    "event loop, ASGI": ("asyncio/", "starlette", "uvicorn", "/openai/", "serving/inbox"),
}
"""What the server does, by the innermost frame whose file is named here; the rest is others."""
OTHERS = "others"
_SAMPLES_PER_S = 250


def run(args: argparse.Namespace) -> Report:
    """Measure each API: tokens at each number of streams, then short answers."""
    seconds, counts = (0.3, [4]) if args.quick else (args.seconds, args.streams)
    report = Report("hot_path", "what a token and a request cost, and where")
    titles = [f"us of CPU a {one}: user + system, wake-ups" for one in ("token", "request")]
    tokens_grid, requests_grid = (Grid(title, ("", "all", *PARTS)) for title in titles)
    shares = Grid("us of the server's user time a token", ("", *WHAT, OTHERS))
    with _servers.mock_server(tps=TPS, step_clock=True) as server:
        for api in (CHAT, PREDICTIONS):
            _measure(server, api, 8, 8)  # warms up
            for count in counts:
                name = f"{api.name}, {count} x {TPS} tok/s"
                wave, used = _measure(server, api, round(TPS * seconds), count)
                every, *parts = _cells(used, wave.tokens)
                tokens_grid.add(name, every, *parts)
                report.figures.append(Figure(f"{name}: CPU a token", float(every), "us"))
                report.notes += _load.busy_notes({name: wave})
                if found := _sampled(server, api, round(TPS * seconds), count):
                    each = used["server"].user / wave.tokens * 1e6 / found.total()
                    shares.add(name, *(found[what] * each for what in (*WHAT, OTHERS)))
            wave, used = _measure(server, api, 2, 16, seconds)
            requests_grid.add(f"{api.name}, 16 at once", *_cells(used, len(wave.streams)))
    if not shares.rows:
        report.notes.append("what the server does is not told: there is no py-spy on PATH")
    report.grids += [tokens_grid, requests_grid, *([shares] if shares.rows else [])]
    if args.write:
        tables = (f"{grid.title}:\n\n{markdown_table(grid)}\n" for grid in report.grids)
        write_between(args.write, MARKS, "\n".join(tables))
    return report


def _measure(
    server: _servers.Server, api: Api, tokens: int, count: int, seconds: float = 0.0
) -> tuple[_load.Wave, Mapping[str, Use]]:
    say(f"{api.name}: {count} streams of {tokens} tokens")
    before = uses(server.pid)
    wave = _load.wave(server.base(api), {"max_tokens": tokens}, count, seconds, api=api)
    used = dict.fromkeys(PARTS, Use())
    for part, after in uses(server.pid).items():
        column = next(name for name, begins in PARTS.items() if part.startswith(begins))
        spent = zip(after, before.get(part, Use()), used[column], strict=True)
        used[column] = Use(*(now - then + sum_ for now, then, sum_ in spent))
    return wave, used


def _cells(used: Mapping[str, Use], count: int) -> Iterator[str]:
    """The sum, then each part: microseconds and wake-ups for one of `count`."""
    yield f"{sum(part.user + part.system for part in used.values()) / count * 1e6:.0f}"
    for part in used.values():
        user, system, woken = (value / count for value in part)
        yield f"{user * 1e6:.1f} + {system * 1e6:.1f}, {woken:.2g}"


def _sampled(server: _servers.Server, api: Api, tokens: int, count: int) -> Counter[str]:
    """Samples of the server's threads that hold the GIL, by what they do; none without py-spy."""
    found: Counter[str] = Counter()
    sampler = shutil.which("py-spy")
    if sampler is None:
        return found
    pid = next(pid for part, pid in tree(server.pid) if part == "server")
    with tempfile.NamedTemporaryFile("r") as stacks:
        command = f"record --pid {pid} --gil --rate {_SAMPLES_PER_S} --format raw --duration"
        words = [sampler, *command.split(), f"{max(1, tokens // TPS)}", "--output", stacks.name]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            _load.wave(server.base(api), {"max_tokens": tokens}, count, api=api)
        for line in stacks:
            frames, _, samples = line.rpartition(" ")
            found[what_of(frames.split(";"))] += int(samples)
    return found


def what_of(frames: list[str]) -> str:
    """What a stack does, outermost frame first, each as ``name (file:line)``."""
    for frame in reversed(frames):
        for what, files in WHAT.items():
            if any(file in frame for file in files):
                return what
    return OTHERS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=6, help="of each load")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="at once")
    parser.add_argument("--write", type=Path, help="page to write the tables into")


if __name__ == "__main__":
    main("hot_path", __doc__, run, arguments)
