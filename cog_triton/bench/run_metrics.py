"""Metrics of a run, computed from its request records; docs/bench.md defines each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cog_triton.bench.load_generator import GeneratorUsage, RunResult
from cog_triton.bench.request_record import CUT, FAILED, OK, Record

BUSY_CPU, BUSY_LAG_S = 0.85, 0.010
"""Thresholds beyond which the generator's own delays distort its measurements."""

_PER_REQUEST: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "ttft_from_sending": lambda record: record.ttft_sent,
    "tpot": lambda record: record.tpot,
    "e2el": lambda record: record.latency,
    "e2el_from_sending": lambda record: record.service,
    "tps_per_user": lambda record: 1 / record.tpot if record.tpot else None,
    "single_stream_tps": lambda record: record.single_stream_tps,
    "input_tokens": lambda record: record.input_tokens,
    "output_tokens": lambda record: record.output_tokens,
    "server_latency": lambda record: record.server.get("predict_time"),
    "server_ttft": lambda record: record.server.get("time_to_first_token"),
    "server_tps": lambda record: record.server.get("tokens_per_second"),
    "queue_time": lambda record: record.server.get("queue_time"),
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a sample; percentiles are interpolated linearly, `std` is the population's."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def summarize(values: Iterable[float | None]) -> Summary | None:
    """Summarize the values that are not None; None if there are none."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if not known.size:
        return None
    points = known.mean(), known.std(), *np.percentile(known, [0, 50, 90, 95, 99, 100])
    return Summary(known.size, *map(float, points))


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """All metrics of one run; times in seconds, rates per second.

    `concurrency` is the mean number of requests in flight; `warning` says if the load generator
    was a bottleneck, and is blank if it was none.
    """

    seconds: float
    completed: int
    failed: int
    cut: int
    interrupted: bool
    failures: Mapping[str, int]
    examples: Mapping[str, str]
    concurrency: float
    metrics: Mapping[str, Summary]
    rates: Mapping[str, float]
    warning: str
    notes: Sequence[str] = field(default_factory=list)


def compute_metrics(run: RunResult) -> RunMetrics:
    """Compute all metrics of `run`."""
    by_status = Counter(record.status for record in run.records)
    done = [record for record in run.records if record.status == OK]
    failed = [record for record in run.records if record.status == FAILED]
    # A record that was cut ended when it was hung up on, which is after the last answer.
    ends = [(record.sent, min(record.ended or run.ended, run.ended)) for record in run.records]
    in_flight = sum(max(0.0, end - sent) for sent, end in ends if sent)
    found = {name: summarize(map(of, done)) for name, of in _PER_REQUEST.items()}
    found["itl"] = summarize(gap for record in done for gap in record.gaps())
    return RunMetrics(
        seconds=run.seconds,
        completed=len(done),
        failed=len(failed),
        cut=by_status[CUT],
        interrupted=run.interrupted,
        failures=dict(Counter(record.code for record in failed).most_common()),
        examples={record.code: record.error for record in reversed(failed)},
        concurrency=in_flight / run.seconds,
        metrics={name: summary for name, summary in found.items() if summary},
        rates=_rates(done, run.seconds),
        warning=_warning(run.usage, run.records),
        notes=[*run.notes, *_notes(done)],
    )


def _notes(done: Sequence[Record]) -> list[str]:
    notes = []
    counted = [record for record in done if record.output_tokens and record.wanted_tokens]
    short = sum((each.output_tokens or 0) < (each.wanted_tokens or 0) for each in counted)
    if short:
        notes.append(f"{short} of {len(done)} answers have fewer tokens than were asked for")
    if done and any(record.output_tokens is None for record in done):
        notes.append("The server does not tell all token counts: metrics of tokens lack those")
    return notes


def _rates(done: Sequence[Record], seconds: float) -> dict[str, float]:
    rates = {"requests": len(done) / seconds}
    output = [record.output_tokens for record in done if record.output_tokens is not None]
    prompt = [record.input_tokens for record in done if record.input_tokens is not None]
    if output:
        rates["output_tokens"] = sum(output) / seconds
    if output and prompt:
        rates["total_tokens"] = (sum(output) + sum(prompt)) / seconds
    return rates


def _warning(usage: GeneratorUsage, records: Sequence[Record]) -> str:
    cpu = usage.cpu / usage.wall if usage.wall > 0 else 0.0
    lags = summarize(usage.lags)
    late = summarize(record.sent - record.scheduled for record in records if record.sent)
    reasons = []
    if cpu > BUSY_CPU:
        reasons.append(f"it used {cpu:.0%} of a core")
    if lags and lags.p99 > BUSY_LAG_S:
        reasons.append(f"its event loop ran {lags.p99 * 1000:.0f} ms late (p99)")
    if late and late.p99 > BUSY_LAG_S:
        reasons.append(f"it sent requests {late.p99 * 1000:.0f} ms after they were due (p99)")
    if not reasons:
        return ""
    whose = "" if cpu > BUSY_CPU / 2 else ", for others had this machine's cores"
    return (
        f"the load generator was a bottleneck: {' and '.join(reasons)}{whose}; its own delays"
        " are in the numbers. Use a lower load, or another machine"
    )
