"""``cog-triton bench``: measures, reports and writes the JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from cog_triton.bench import load_generator, report
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
        done = uvloop.run(load_generator.measure(options, partial(err.print, markup=False)))
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
