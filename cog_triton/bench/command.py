"""``cog-triton bench``: measures, reports and writes the JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from cog_triton.bench import load_generator, report
from cog_triton.bench.load_generator import Progress, RunResult
from cog_triton.bench.options import Options, TargetName
from cog_triton.bench.run_metrics import compute_metrics
from cog_triton.bench.targets import KINDS
from cog_triton.errors import InvalidArgument, NothingSucceeded

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of every program of a shell."""
_PORTS = {
    TargetName.COG: "PORT",
    TargetName.TRITON: "TRITON_HTTP_PORT",
    TargetName.OPENAI: "OPENAI_PORT",
}
_PLAIN_S = 5.0
_CLEAR = "\r\x1b[2K"


@contextmanager
def display(console: Console, options: Options) -> Iterator[Callable[[Progress, float], None]]:
    """The callback for `load_generator.measure`; a terminal's line is removed at the end.

    It runs on the load generator's event loop, so that it writes bare text: 10 us, where rich's
    live display takes milliseconds.
    """
    if console.is_terminal and not console.is_dumb_terminal:

        def changing(progress: Progress, seconds: float) -> None:
            console.file.write(_CLEAR + line(options, progress, seconds)[: console.width - 1])
            console.file.flush()

        try:
            yield changing
        finally:
            console.file.write(_CLEAR)
            console.file.flush()
        return
    due = _PLAIN_S

    def plain(progress: Progress, seconds: float) -> None:
        nonlocal due
        if seconds >= due:
            due += _PLAIN_S
            console.print(line(options, progress, seconds), markup=False)

    yield plain


def line(options: Options, progress: Progress, seconds: float) -> str:
    """Text of the line: seconds, requests and tokens so far."""
    of = f" of {options.duration:g}" if options.duration else ""
    wanted = f" of {options.requests}" if options.requests else ""
    failed = f", {progress.failed} failed" if progress.failed else ""
    rate = progress.tokens / seconds if seconds > 0 else 0.0
    return (
        f"{options.rate:g} {options.unit.value}: {seconds:.0f}{of} s: {progress.done}{wanted} done,"
        f" {progress.running} running{failed}, {rate:.0f} output tokens/s"
    )


def default_url(target: TargetName) -> str:
    """Base URL without --url: this machine, with the port of the settings."""
    port = os.environ.get(_PORTS[target]) or KINDS[target].default_port
    return f"http://127.0.0.1:{port}"


def api_key(target: TargetName) -> str | None:
    """API key for the target from the environment."""
    return (os.environ.get("OPENAI_API_KEY") or None) if target is TargetName.OPENAI else None


def parse_inputs(pairs: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs, values being JSON or else text; raises E1005."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"--input={pair!r}: must be NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def run(
    options: Options,
    json_file: Path | None,
    say: Callable[[str], None],
    err: Console,
) -> int:
    """Measure and report, and write `json_file`; returns the exit code.

    Raises E1400, E1005 and others before any load, and E2400 after the report if nothing succeeded.
    """
    report.require_writable(json_file)
    try:
        done = uvloop.run(_measure(options, err))
    except KeyboardInterrupt:
        err.print("Interrupted before anything was measured", markup=False)
        return INTERRUPTED
    found = compute_metrics(done)
    say(report.text(options, found))
    if json_file:
        report.write(json_file, report.as_json(options, found))
    if done.interrupted:
        return INTERRUPTED
    if not found.completed:
        reasons = [f"{code}: {text}" for code, text in found.examples.items()]
        raise NothingSucceeded(f"no request succeeded; {'; '.join(reasons) or 'none was sent'}")
    return 0


async def _measure(options: Options, err: Console) -> RunResult:
    notes = await load_generator.warm_up(options)
    with display(err, options) as show:
        done = await load_generator.measure(options, show)
    return dataclasses.replace(done, notes=list(dict.fromkeys([*notes, *done.notes])))
