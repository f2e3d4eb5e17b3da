"""``cog-triton bench``: measures, reports and writes files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from cog_triton.bench import load_generator, plot, report, run_metrics
from cog_triton.bench.http_client import Client, TransportError, split_url
from cog_triton.bench.load_generator import Progress, RunResult
from cog_triton.bench.options import Options, TargetName
from cog_triton.bench.prompt_source import PromptSource
from cog_triton.bench.run_metrics import RunMetrics, compute_metrics
from cog_triton.bench.targets import KINDS
from cog_triton.errors import CogTritonError, InvalidArgument, NothingSucceeded, TargetUnavailable
from cog_triton.system.gpus import gpu_names
from cog_triton.system.redaction import redact_address

_PLAIN_S = 5.0
_CPUS = Path("/proc/cpuinfo")
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
    level = f"{options.rate:g} {options.unit.value}: "
    return (
        f"{level}{seconds:.0f}{of} s: {progress.done}{wanted} done, {progress.running} running"
        f"{failed}, {rate:.0f} output tokens/s"
    )


INTERRUPTED = 130
"""Exit code after Ctrl-C, as of every program of a shell."""
_PORTS = {
    TargetName.COG: "PORT",
    TargetName.TRITON: "TRITON_HTTP_PORT",
    TargetName.OPENAI: "OPENAI_PORT",
}


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output files; None for those not wanted."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Raise E1005 or E1401 before measuring for files that could not be written."""
        for name in ("json", "csv", "plot"):
            report.require_writable(f"--{name}", getattr(self, name))
        if self.plot is not None:
            plot.require()


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


def parse_sweep(text: str) -> list[int]:
    """Parse ascending levels of concurrency; raises E1005."""
    parts = text.split(",")
    levels = [int(part) for part in parts if part.strip().isdecimal() and int(part) > 0]
    if len(levels) != len(parts) or levels != sorted(set(levels)):
        raise InvalidArgument(f"--sweep={text!r}: must be ascending whole numbers, as 1,2,4")
    return levels


def run(
    levels: Sequence[Options],
    outputs: Outputs,
    metrics_url: str | None,
    say: Callable[[str], None],
    out: Console,
    err: Console,
    *,
    verbose: bool = False,
) -> int:
    """Measure each of `levels` and report; returns the exit code. See `report.text` of `verbose`.

    Raises E1400, E1005 and others before any load, and E2400 after the report when nothing
    succeeded.
    """
    outputs.check()
    prompts = PromptSource(levels[0]).describe()
    try:
        runs, model = uvloop.run(_measure(levels, metrics_url, err))
    except KeyboardInterrupt:
        err.print("Interrupted before anything was measured", markup=False)
        return INTERRUPTED
    if len(levels) > 1:
        out.print(_table(runs))
    for options, _, found in runs:
        if len(levels) == 1 or verbose:
            say(report.text(options, found, prompts, verbose=verbose))
        elif lines := [*report.troubles(found)]:
            say("\n".join([f"At {options.rate:g} at once:", *lines, ""]))
    _write(outputs, runs, model)
    if any(run.interrupted for _, run, _ in runs):
        return INTERRUPTED
    if not any(found.completed for _, _, found in runs):
        reasons = [f"{code}: {text}" for code, text in runs[0][2].examples.items()]
        raise NothingSucceeded(f"no request succeeded; {'; '.join(reasons) or 'none was sent'}")
    return 0


async def _measure(
    levels: Sequence[Options],
    metrics_url: str | None,
    err: Console,
) -> tuple[list[plot.Level], str]:
    """What was measured, and the model's name, blank if nothing tells it."""
    notes = await load_generator.warm_up(levels[0])
    runs: list[plot.Level] = []
    model = levels[0].model or ""
    for options in levels:
        before = await _scrape(options, metrics_url)
        with display(err, options) as show:
            done = await load_generator.measure(options, show)
        after = await _scrape(options, metrics_url) if before is not None else None
        model = model or run_metrics.model_of(after or {})
        told = run_metrics.means(before or {}, after) if after is not None else {}
        done = dataclasses.replace(done, notes=list(dict.fromkeys([*notes, *done.notes])))
        found = compute_metrics(options, done, told)
        runs.append((options, done, found))
        if done.interrupted:
            break
    return runs, model


def _machine(url: str) -> str:
    """The processors of this machine, or the address of the one that was measured."""
    host = split_url(url)[0].host
    if host != "localhost" and not host.startswith(("127.", "::1", "[::1")):
        return f"at {host}"
    found: list[str] = []
    with suppress(CogTritonError):
        found = [f"{count} x {name}" for name, count in Counter(gpu_names()).items()]
    names = re.findall(r"^model name\s*:\s*(.+)$", _CPUS.read_text("utf-8", "replace"), re.M)
    return ", ".join([*found, *names[:1], f"{len(os.sched_getaffinity(0))} cores"])


def _shown(metrics_url: str) -> str:
    return f"--metrics-url={redact_address(metrics_url)!r}"


async def _scrape(options: Options, url: str | None) -> Mapping[tuple[str, str], float] | None:
    """Prometheus metrics of the server; None if it has none and no URL was given."""
    wanted = url or _metrics_url(options)
    if wanted is None:
        return None
    client = Client(10)
    try:
        answer = await client.fetch("GET", wanted, {})
    except TransportError as error:
        if url:
            raise TargetUnavailable(f"{_shown(url)}: {error}") from error
        return None
    finally:
        client.close()
    if answer.status != 200:
        if url:
            raise TargetUnavailable(f"{_shown(url)}: HTTP {answer.status}")
        return None
    return run_metrics.parse(answer.text.decode("utf-8", "replace"))


def _metrics_url(options: Options) -> str | None:
    if options.target is TargetName.OPENAI:
        return options.url.rstrip("/").removesuffix("/v1") + "/metrics"
    origin, _ = split_url(options.url)
    if options.target is TargetName.TRITON and origin.port == 8000 and not origin.tls:
        return f"http://{origin.host}:8002/metrics"
    return None


def _write(outputs: Outputs, runs: Sequence[plot.Level], model: str) -> None:
    if outputs.json:
        found: list[tuple[Options, RunMetrics]] = [(options, item) for options, _, item in runs]
        report.write("--json", outputs.json, report.as_json(runs[0][0], found))
    if outputs.csv:
        done: list[tuple[Options, RunResult]] = [(options, item) for options, item, _ in runs]
        report.write("--csv", outputs.csv, report.as_csv(done))
    if outputs.plot:
        when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
        subject = ", ".join(filter(None, (model, _machine(runs[0][0].url), when)))
        report.write("--plot", outputs.plot, plot.png(runs, subject))


def _table(runs: Sequence[plot.Level]) -> Table:
    """Summary table of a sweep."""
    table = Table(title="Sweep; times in ms")
    names = ("at once", "req/s", "tok/s", "per user", "TTFT p50", "TTFT p99", "E2E p99", "failed")
    for name in names:
        table.add_column(name, justify="right")
    for options, _, found in runs:

        def cell(name: str, point: str, scale: float, found: RunMetrics = found) -> str:
            summary = found.metrics.get(name)
            return "-" if summary is None else f"{getattr(summary, point) * scale:.2f}"

        tokens = found.rates.get("output_tokens")
        table.add_row(
            f"{options.rate:g}",
            f"{found.rates['requests']:.2f}",
            "-" if tokens is None else f"{tokens:.1f}",
            cell("tps_per_user", "mean", 1),
            cell("ttft", "p50", 1000),
            cell("ttft", "p99", 1000),
            cell("e2el", "p99", 1000),
            str(found.failed),
        )
    return table
