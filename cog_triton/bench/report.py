"""``cog-triton bench``: measures; reports all metrics as a table, with what went wrong, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console

from cog_triton import __version__
from cog_triton.bench import load_generator
from cog_triton.bench.options import Options
from cog_triton.bench.run_metrics import RunMetrics, compute_metrics
from cog_triton.errors import InvalidArgument, NothingSucceeded
from cog_triton.system.redaction import redact_address

SCHEMA = 2
INTERRUPTED = 130
"""Exit code after Ctrl-C, as of every program of a shell."""
_ROWS = (
    ("TTFT, ms", "ttft", 1000),
    ("TTFT from sending, ms", "ttft_from_sending", 1000),
    ("ITL, ms", "itl", 1000),
    ("TPOT, ms", "tpot", 1000),
    ("E2E latency, ms", "e2el", 1000),
    ("E2E from sending, ms", "e2el_from_sending", 1000),
    ("TPS per user", "tps_per_user", 1),
    ("Single-stream TPS", "single_stream_tps", 1),
    ("Input tokens", "input_tokens", 1),
    ("Output tokens", "output_tokens", 1),
    ("Server: TTFT, ms", "server_ttft", 1000),
    ("Server: E2E, ms", "server_latency", 1000),
    ("Server: TPS", "server_tps", 1),
    ("Server: queue, ms", "queue_time", 1000),
)
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_RATES = (
    ("Request throughput", "requests", "requests/s"),
    ("Output token throughput", "output_tokens", "tokens/s"),
    ("Total token throughput", "total_tokens", "tokens/s"),
)


def text(options: Options, run: RunMetrics) -> str:
    """The report."""
    return "".join(f"{line}\n" for line in _lines(options, run))


def _lines(options: Options, run: RunMetrics) -> Iterator[str]:
    rows = [(title, run.metrics[name], by) for title, name, by in _ROWS if name in run.metrics]
    if rows:
        yield f"{'':22}" + "".join(f"{name:>10}" for name in _COLUMNS)
    for title, summary, by in rows:
        yield f"{title:22}" + "".join(f"{getattr(summary, n) * by:>10.2f}" for n in _COLUMNS)
    for title, name, unit in _RATES:
        if name in run.rates:
            yield f"{title}: {run.rates[name]:.3f} {unit}"
    ended = "interrupted; " if run.interrupted else ""
    cut = f", {run.cut} cut off" if run.cut else ""
    yield f"Requests: {ended}{run.completed} completed, {run.failed} failed{cut}"
    yield f"In flight: {run.concurrency:.2f} (mean)"
    where = f"{options.target.value} at {redact_address(options.url)}"
    yield f"Load: {options.rate:g} {options.unit.value} on {where}"
    words = f"Input: prompts of {options.input_lengths.text} words"
    yield f"{words}; the table has the server's count of tokens, its template's too"
    if run.warning:
        yield f"WARNING: {run.warning}"
    for code, count in run.failures.items():
        yield f"Failed: {code}: {count}, such as: {' '.join(run.examples[code].split())[:160]}"
    yield from (f"Note: {note}." for note in run.notes)


def as_json(options: Options, measured: RunMetrics) -> str:
    """JSON of the options and of all metrics."""
    document = {
        "schema": SCHEMA,
        "cog_triton": __version__,
        "options": asdict(options) | {"url": redact_address(options.url), "api_key": None},
        "runs": [{"rate": options.rate, **asdict(measured)}],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write(path: Path, content: str) -> None:
    """Write the file of --json, ``-`` for stdout; raises E1005 if that fails."""
    try:
        if str(path) == "-":
            sys.stdout.write(content)
        else:
            path.write_text(content, "utf-8")
    except OSError as error:
        raise InvalidArgument(f"--json={str(path)!r}: cannot be written: {error}") from error


def require_writable(path: Path | None) -> None:
    """Raise E1005 unless the directory of `path` exists: before measuring, not after."""
    if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
        raise InvalidArgument(f"--json={str(path)!r}: its directory does not exist")


def run(
    options: Options,
    json_file: Path | None,
    say: Callable[[str], None],
    err: Console,
) -> int:
    """Measure and report, and write `json_file`; returns the exit code.

    Raises E1400, E1005 and others before any load, and E2400 after the report if nothing succeeded.
    """
    require_writable(json_file)
    try:
        done = uvloop.run(load_generator.measure(options, partial(err.print, markup=False)))
    except KeyboardInterrupt:
        err.print("Interrupted before anything was measured", markup=False)
        return INTERRUPTED
    found = compute_metrics(done)
    say(text(options, found))
    if json_file:
        write(json_file, as_json(options, found))
    if done.interrupted:
        return INTERRUPTED
    if not found.completed:
        reasons = [f"{code}: {text}" for code, text in found.examples.items()]
        raise NothingSucceeded(f"no request succeeded; {'; '.join(reasons) or 'none was sent'}")
    return 0
