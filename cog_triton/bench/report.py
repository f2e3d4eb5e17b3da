"""Reports of a run: all metrics as text or JSON.

The text is one table; verbose, the original cog-triton's sections come after it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cog_triton import __version__
from cog_triton.bench.options import Options, OutputMethod, Unit
from cog_triton.bench.run_metrics import RunMetrics, ServerMetric, Summary
from cog_triton.errors import InvalidArgument
from cog_triton.system.redaction import redact_address

_RULE = "-" * 30
_MS = (
    ("TTFT, ms", "ttft"),
    ("TTFT from sending, ms", "ttft_from_sending"),
    ("ITL, ms", "itl"),
    ("TPOT, ms", "tpot"),
    ("E2E latency, ms", "e2el"),
    ("E2E from sending, ms", "e2el_from_sending"),
)
_PLAIN = (
    ("TPS per user", "tps_per_user"),
    ("Input tokens", "input_tokens"),
    ("Output tokens", "output_tokens"),
)
_POINTS = {"Std": "std", "Median": "p50", "Mean": "mean", "Max": "max", "Min": "min"}


def text(options: Options, run: RunMetrics, prompts: str, *, verbose: bool = False) -> str:
    """The report; `prompts` describes the prompt lengths, `verbose` is of the original too."""
    parts = [[*_field(options, run), *_summary(options, run, prompts), *_troubles(run)]]
    if verbose:
        parts += [
            _titled("Test Configuration:", _configuration(options, prompts)),
            _titled("Concurrency levels:", _concurrency(run), rule=False),
            _titled("Statistics for completed predictions:", _single_stream(run)),
            [_RULE, *_latency(run)],
            _titled("Server-side metrics:", _server(run)),
            [_RULE, *_totals(run)],
            _titled("Load generator:", _generator(run)),
        ]
    return "\n".join(line for part in parts for line in part) + "\n"


def _troubles(run: RunMetrics) -> Iterator[str]:
    """What went wrong, and what else to know: warnings, failures by code, notes."""
    if run.generator.warning:
        yield f"WARNING: {run.generator.warning}"
    if run.failures:
        yield from _titled("Failures by code:", _failures(run), rule=False)
    if run.notes:
        yield from _titled("Notes:", [f"{note}." for note in run.notes], rule=False)


def _titled(title: str, lines: Iterator[str] | list[str], *, rule: bool = True) -> list[str]:
    return [_RULE, title, *([_RULE] if rule else []), *lines]


def _summary(options: Options, run: RunMetrics, prompts: str) -> Iterator[str]:
    """What was measured: requests, load, and what their tokens are."""
    ended = "interrupted; " if run.interrupted else ""
    cut = f", {run.cut} cut off" if run.cut else ""
    yield f"Requests: {ended}{run.completed} completed, {run.failed} failed{cut}"
    yield (
        f"Load: {options.rate:g} {options.unit.value} on {options.target.value} at"
        f" {redact_address(options.url)}"
    )
    yield f"Input tokens asked for: {prompts}"
    counted = run.metrics.get("input_tokens")
    if counted is not None:
        yield f"Input tokens counted by the server, its template's too: {counted.mean:.1f} (mean)"


def _configuration(options: Options, prompts: str) -> Iterator[str]:
    yield f"Target: {options.target.value} at {redact_address(options.url)}"
    method = options.output_method or (OutputMethod.YIELD if options.stream else OutputMethod.WAIT)
    size = f", {options.buffer_size} tokens a piece" if options.buffer_size else ""
    yield f"Output Method: {method.value}{size}"
    yield f"Mode: {options.unit.value}"
    yield f"Rate: {options.rate:.1f} {options.unit.value}"
    if options.unit is Unit.RPS:
        yield f"Arrivals: {options.arrival.value}"
    if options.unit is Unit.BATCH:
        yield f"Pause between batches: {options.batch_pause:g} seconds"
    if options.duration is not None:
        yield f"Duration: {options.duration:g} seconds"
    if options.requests is not None:
        yield f"Requests: {options.requests}"
    yield f"Input tokens: {prompts}"
    yield f"Output tokens: {options.output_lengths or 'as the prompt file says, else 128'}"
    if options.tps is not None:
        yield f"Tokens per second asked for: {options.tps:g}"
    yield f"Warm-up requests: {options.warmup}, seed: {options.seed}"


def _concurrency(run: RunMetrics) -> Iterator[str]:
    levels = run.concurrency
    if levels is None:
        yield "Nothing ran"
        return
    for name, level in asdict(levels).items():
        yield f"{name.title()} concurrency: {f'{level:.4f}' if name == 'mean' else level}"


def _single_stream(run: RunMetrics) -> Iterator[str]:
    yield "Single-stream TPS:"
    tps = run.metrics.get("single_stream_tps")
    if tps is None:
        yield "SSTPS - unknown: the server tells no token counts"
        return
    for name, point in _POINTS.items():
        yield f"SSTPS - {name}: {getattr(tps, point):.3f}"


def _latency(run: RunMetrics) -> Iterator[str]:
    latency = run.metrics.get("e2el")
    if latency is None:
        yield "Latency - unknown: no request was completed"
        return
    for name, point in _POINTS.items():
        title = "Latency - Std" if name == "Std" else f"{name} response latency"
        yield f"{title}: {getattr(latency, point):.3f} seconds"


def _server(run: RunMetrics) -> Iterator[str]:
    titles = {
        "tps": "Server-side TPS",
        "latency": "Response Latency",
        "ttft": "Time to First Token",
        "queue_time": "Queue Time",
    }
    for name, title in titles.items():
        if name in run.server:
            yield title
            yield from _server_metric(run.server[name])
    if run.prometheus:
        yield "From /metrics, over this run"
        for key, value in run.prometheus.items():
            shown = f"mean {value * 1000:.2f} ms" if "_seconds" in key else f"{value:.0f}"
            yield f"--{key}: {shown}"
    if not run.server and not run.prometheus:
        yield "The server tells none"


def _server_metric(compared: ServerMetric) -> Iterator[str]:
    names = {"mean": "mean", "std": "std", "median": "p50", "min": "min", "max": "max"}
    for shown, name in names.items():
        expected = getattr(compared.expected, name) if compared.expected else None
        wanted = "" if expected is None else f"Expected {shown}: {expected:.3f}, "
        yield f"--{wanted}Actual {shown}: {getattr(compared.actual, name):.3f}"


def _totals(run: RunMetrics) -> Iterator[str]:
    if run.interrupted:
        yield "Interrupted: this is what was done so far"
    yield f"Total requests made: {run.made}"
    yield f"Total requests started: {run.started}"
    yield f"Total requests completed: {run.completed}"
    if run.cut:
        yield f"Cut off by the interruption: {run.cut}"
    yield f"Failure rate: {run.failure_rate:.3f}, Total failures: {run.failed}"
    yield f"Cog already running prediction: {run.failures.get('HTTP 409', 0)}"
    yield f"E2E throughput: {run.rates['requests']:.3f} rps"


def _field(options: Options, run: RunMetrics) -> Iterator[str]:
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    if any(name in run.metrics for _, name in (*_MS, *_PLAIN)):
        yield f"{'':22}" + "".join(f"{name:>10}" for name in columns)
    for rows, scale in ((_MS, 1000.0), (_PLAIN, 1.0)):
        for title, name in rows:
            if summary := run.metrics.get(name):
                yield f"{title:22}" + "".join(_cell(summary, name, scale) for name in columns)
    rates = run.rates
    yield f"Request throughput: {rates['requests']:.3f} requests/s"
    if "output_tokens" in rates:
        yield f"Output token throughput: {rates['output_tokens']:.1f} tokens/s"
    if "total_tokens" in rates:
        yield f"Total token throughput: {rates['total_tokens']:.1f} tokens/s"


def _cell(summary: Summary, name: str, scale: float) -> str:
    return f"{getattr(summary, name) * scale:>10.2f}"


def _generator(run: RunMetrics) -> Iterator[str]:
    own = run.generator
    yield f"CPU: {own.cpu:.1%} of a core"
    yield f"Event-loop lag: p99 {own.lag_p99 * 1000:.1f} ms, max {own.lag_max * 1000:.1f} ms"
    yield f"Requests sent after they were due: p99 {own.late_p99 * 1000:.1f} ms"
    if own.warning:
        yield f"WARNING: {own.warning}"


def _failures(run: RunMetrics) -> Iterator[str]:
    for code, count in run.failures.items():
        yield f"{code}: {count}, such as: {' '.join(run.examples[code].split())[:160]}"


SCHEMA = 1


def as_json(options: Options, measured: RunMetrics) -> str:
    """JSON of the options and of all metrics."""
    document = {
        "schema": SCHEMA,
        "cog_triton": __version__,
        "options": _plain({**asdict(options), "url": redact_address(options.url), "api_key": None}),
        "runs": [{"rate": options.rate, **_plain(asdict(measured))}],
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
