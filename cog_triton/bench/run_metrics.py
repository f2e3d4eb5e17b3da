"""Metrics of a run, computed from its request records; docs/bench.md defines each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cog_triton.bench.load_generator import GeneratorUsage, RunResult
from cog_triton.bench.options import Options
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
}
_EXPECTED = {
    "tps": "expected_tokens_per_second",
    "latency": "expected_duration",
    "ttft": "expected_time_to_first_token",
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
class Concurrency:
    """Number of requests in flight, weighted by time."""

    mode: int
    mean: float
    median: float
    max: int
    min: int


def concurrency(
    spans: Sequence[tuple[float, float]], start: float, end: float
) -> Concurrency | None:
    """Concurrency of requests with these (begin, end), from `start` to `end`; None if empty."""
    changes = [(min(max(at, start), end), step) for a, b in spans for at, step in ((a, 1), (b, -1))]
    lasted: dict[int, float] = {}
    level, before = 0, start
    for at, step in [*sorted(changes), (end, 0)]:
        if at > before:
            lasted[level] = lasted.get(level, 0.0) + at - before
            before = at
        level += step
    total = sum(lasted.values())
    if not total:
        return None
    passed, median = 0.0, 0
    for value in sorted(lasted):
        passed += lasted[value]
        median = value
        if passed >= total / 2:
            break
    return Concurrency(
        mode=max(lasted, key=lambda value: lasted[value]),
        mean=sum(value * seconds for value, seconds in lasted.items()) / total,
        median=float(median),
        max=max(lasted),
        min=min(lasted),
    )


@dataclass(frozen=True, slots=True)
class ServerMetric:
    """A metric that the server reports for each request, and its expected value."""

    expected: Summary | None
    actual: Summary


@dataclass(frozen=True, slots=True)
class GeneratorHealth:
    """Health of the load generator: CPU as a share of a core, delays in seconds."""

    cpu: float
    lag_p99: float
    lag_max: float
    late_p99: float
    warning: str


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """All metrics of one run; times in seconds, rates per second."""

    seconds: float
    made: int
    started: int
    completed: int
    failed: int
    cut: int
    interrupted: bool
    failures: Mapping[str, int]
    examples: Mapping[str, str]
    concurrency: Concurrency | None
    metrics: Mapping[str, Summary]
    rates: Mapping[str, float]
    server: Mapping[str, ServerMetric]
    prometheus: Mapping[str, float]
    generator: GeneratorHealth
    notes: Sequence[str] = field(default_factory=list)

    @property
    def failure_rate(self) -> float:
        """Share of failures among ended requests."""
        return self.failed / max(1, self.completed + self.failed)


def compute_metrics(
    options: Options, run: RunResult, prometheus: Mapping[str, float]
) -> RunMetrics:
    """Compute all metrics of `run`."""
    by_status = Counter(record.status for record in run.records)
    done = [record for record in run.records if record.status == OK]
    failed = [record for record in run.records if record.status == FAILED]
    # A record that was cut ended when it was hung up on, which is after the last answer.
    spans = [(record.sent, record.ended or run.ended) for record in run.records if record.sent]
    found = {name: summarize(map(of, done)) for name, of in _PER_REQUEST.items()}
    found["itl"] = summarize(gap for record in done for gap in record.gaps())
    notes = list(run.notes)
    short = sum(
        1
        for record in done
        if record.output_tokens
        and record.wanted_tokens
        and record.output_tokens < record.wanted_tokens
    )
    if short:
        notes.append(f"{short} of {len(done)} answers have fewer tokens than were asked for")
    if done and any(record.output_tokens is None for record in done):
        notes.append("The server does not tell all token counts: metrics of tokens lack those")
    return RunMetrics(
        seconds=run.seconds,
        made=len(run.records),
        started=sum(1 for record in run.records if record.sent),
        completed=len(done),
        failed=len(failed),
        cut=by_status[CUT],
        interrupted=run.interrupted,
        failures=dict(Counter(record.code for record in failed).most_common()),
        examples={record.code: record.error for record in reversed(failed)},
        concurrency=concurrency(spans, run.started, max(run.ended, run.started)),
        metrics={name: summary for name, summary in found.items() if summary},
        rates=_rates(done, run.seconds),
        server=_server(options, done),
        prometheus=prometheus,
        generator=_generator_health(run.usage, run.records),
        notes=notes,
    )


def _rates(done: Sequence[Record], seconds: float) -> dict[str, float]:
    rates = {"requests": len(done) / seconds}
    output = [record.output_tokens for record in done if record.output_tokens is not None]
    prompt = [record.input_tokens for record in done if record.input_tokens is not None]
    if output:
        rates["output_tokens"] = sum(output) / seconds
    if output and prompt:
        rates["total_tokens"] = (sum(output) + sum(prompt)) / seconds
    return rates


def _server(options: Options, done: Sequence[Record]) -> dict[str, ServerMetric]:
    """TPS, latency and TTFT that the server reports with answers, and their expected values.

    A mock server tells that, too; else it follows from --tps.
    """

    def tps(record: Record) -> float | None:
        if "tokens_per_second" in record.server:
            return record.server["tokens_per_second"]
        took = record.server.get("predict_time")
        return record.output_tokens / took if record.output_tokens and took else None

    told: dict[str, Callable[[Record], float | None]] = {
        "tps": tps,
        "latency": lambda record: record.server.get("predict_time"),
        "ttft": lambda record: record.server.get("time_to_first_token"),
        "queue_time": lambda record: record.server.get("queue_time"),
    }
    found = {}
    for name, of in told.items():
        if actual := summarize(map(of, done)):
            wanted = summarize(_expected(name, options.tps, record) for record in done)
            found[name] = ServerMetric(wanted, actual)
    return found


def _expected(name: str, tps: float | None, record: Record) -> float | None:
    own = _EXPECTED.get(name, "")
    if own in record.server or not tps:
        return record.server.get(own)
    follows = {"tps": tps, "latency": (record.wanted_tokens or 0) / tps, "ttft": 1 / tps}
    return follows.get(name)


def _generator_health(usage: GeneratorUsage, records: Sequence[Record]) -> GeneratorHealth:
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
    warning = ""
    if reasons:
        whose = "" if cpu > BUSY_CPU / 2 else ", for others had this machine's cores"
        warning = (
            f"the load generator was a bottleneck: {' and '.join(reasons)}{whose}; its own delays"
            " are in the numbers. Use a lower load, or another machine"
        )
    return GeneratorHealth(
        cpu,
        lags.p99 if lags else 0.0,
        lags.max if lags else 0.0,
        late.p99 if late else 0.0,
        warning,
    )


_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)
_SUM = re.compile(r"(?P<base>.+)_sum")
_LABEL = re.compile(r"(\w+)=\"([^\"]*)\"")
_WANTED = re.compile(
    r"(time_to_first_token|inter_token_latency|time_per_output_token|queue_time|request_duration"
    r"|e2e_request_latency)_seconds$"
)
_TRITON = re.compile(r"nv_inference_(request|queue|compute_infer)_duration_us")
Samples = Mapping[tuple[str, str], float]


def parse(text: str) -> Samples:
    """Parse metrics into values by name and labels."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in _LINE.findall(text):
        try:
            found[name, labels] = float(value)
        except ValueError:
            continue
    return found


def means(before: Samples, after: Samples) -> dict[str, float]:
    """Mean seconds of each request histogram, and tokens generated, between two scrapes."""
    change = {key: value - before.get(key, 0.0) for key, value in after.items()}
    found: dict[str, float] = {}
    for (name, labels), value in change.items():
        match = _SUM.fullmatch(name)
        if match and _WANTED.search(match["base"]):
            count = change.get((f"{match['base']}_count", labels), 0)
            if count > 0:
                found[f"{match['base']}{_short(labels)}"] = value / count
        elif name.endswith("generation_tokens_total") and value > 0:
            found[name] = value
        elif (match := _TRITON.fullmatch(name)) and value > 0:
            count = change.get(("nv_inference_request_success", labels), 0)
            if count > 0:
                found[f"{match[0].removesuffix('_us')}_seconds{_short(labels)}"] = (
                    value / count / 1e6
                )
    return found


def _short(labels: str) -> str:
    """Label of the model, which tells Triton's models apart."""
    values = dict(_LABEL.findall(labels))
    model = values.get("model") if "version" in values else None
    return f" ({model})" if model else ""
