"""First start: from a clone with empty caches to READY by `make serve`, phase by phase; then again.

What uv downloads and unpacks is the package index's and uv's own time, the rest is ours. A Python
of uv's that is there already is not downloaded again.

    .venv/bin/python benchmarks/first_start.py [--starts 5]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from _report import Figure, Grid, Report, main, say

from cog_triton.system.ports import free_ports

ROOT = Path(__file__).parents[1]
_READY = "Ready in "
# What a line of `make serve` begins: its phase, and whose time that is.
PHASES = (
    ("setup: [1/", "uv itself", "uv's"),
    ("setup: [2/", "Python", "uv's"),
    ("setup: [3/", "locked packages, and cog-triton", "uv's"),
    ("setup: done", "demo engine: check of its config", "ours"),
    ("[model]", "demo engine: build", "ours"),
    ("[package]", "demo engine: engine.tar", "ours"),
    ("Built engine.tar", "start, with unpacking", "ours"),
)
_LEFT_OUT = ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")


def make_serve(checkout: Path, scratch: Path) -> list[tuple[float, str]]:
    """Run it until it is ready, and stop it; lines with their time in seconds from its start."""
    names = ("PORT", "OPENAI_PORT", "TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    environment |= dict(zip(names, map(str, free_ports(len(names))), strict=True))
    environment |= {
        "UV_CACHE_DIR": str(scratch / "uv"),
        "COG_TRITON_WORK_DIR": str(scratch / "work"),
    }
    lines = []
    began = time.monotonic()
    process = subprocess.Popen(
        ["make", "--no-print-directory", "serve"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    try:
        for line in process.stdout:
            lines.append((time.monotonic() - began, line.strip()))
            if line.startswith(_READY):
                return lines
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.close()
        process.wait(60)
    raise SystemExit("\n".join(text for _, text in lines[-20:]))


def phases(lines: list[tuple[float, str]]) -> list[tuple[str, str, float]]:
    """Name, whose, and seconds of each phase that was seen."""
    begun = []
    for beginning, name, whose in PHASES:
        at = next((at for at, line in lines if line.startswith(beginning)), None)
        if at is not None:
            begun.append((name, whose, at))
    ends = [at for _, _, at in begun[1:]] + [lines[-1][0]]
    return [(name, whose, end - at) for (name, whose, at), end in zip(begun, ends, strict=True)]


def run(args: argparse.Namespace) -> Report:
    """Measure one first start, and `starts` more."""
    report = Report("first_start", "from nothing to READY")
    with tempfile.TemporaryDirectory(prefix="cog-triton-first-") as temporary:
        checkout, scratch = Path(temporary, "checkout"), Path(temporary, "scratch")
        subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
        lines = make_serve(checkout, scratch)
        grid = Grid("seconds of the first make serve", ("phase", "whose", "seconds"))
        found = phases(lines)
        for name, whose, seconds in found:
            grid.add(name, whose, f"{seconds:.1f}")
            say(f"{name}: {seconds:.1f} s")
        report.grids.append(grid)
        again = []
        for _ in range(1 if args.quick else args.starts):
            again.append(make_serve(checkout, scratch)[-1][0])
            say(f"start again: {again[-1]:.1f} s")
    ours = sum(seconds for _, whose, seconds in found if whose == "ours")
    report.figures += [
        Figure("from nothing to READY", lines[-1][0], "s", 45),
        Figure("of which not uv's", ours, "s", 20),
        Figure(f"second start, median of {len(again)}", statistics.median(again), "s", 8),
    ]
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, default=5, help="starts after the first")


if __name__ == "__main__":
    main("first_start", __doc__, run, arguments)
