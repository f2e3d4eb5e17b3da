"""Metrics, report and load of ``cog-triton bench``, against values worked out by hand.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/unit/test_bench_metrics.py, and read the
diff of tests/unit/golden/bench.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bench_runs import START, options, record, run

from cog_triton.bench import load_generator, report
from cog_triton.bench.http_client import Client, now
from cog_triton.bench.load_generator import LoadGenerator, RunResult, offsets
from cog_triton.bench.options import Lengths, Options, OutputMethod, Prompt, Unit
from cog_triton.bench.request_record import CUT, FAILED, OK, Record
from cog_triton.bench.run_metrics import compute_metrics, summarize
from cog_triton.bench.targets import Failure, Target
from cog_triton.errors import InvalidArgument


def test_summary_of_a_sample() -> None:
    found = summarize([4.0, None, 1.0, 3.0, 2.0, 5.0])
    assert found is not None
    values = dataclasses.asdict(found)
    assert values.pop("std") == pytest.approx(2**0.5)
    assert values == pytest.approx(
        {"count": 5, "mean": 3, "min": 1, "p50": 3, "p90": 4.6, "p95": 4.8, "p99": 4.96, "max": 5}
    )
    assert summarize([None]) is None


def test_latencies_of_a_request() -> None:
    one = record(0, 1.0, 1.5, 1.7, 2.1)
    assert one.ttft == pytest.approx(0.5)
    assert one.ttft_sent == pytest.approx(0.4)
    assert one.latency == pytest.approx(1.1)
    assert one.service == pytest.approx(1.0)
    assert one.tpot == pytest.approx(0.6 / 2)
    assert one.single_stream_tps == pytest.approx(3.0)
    assert one.gaps() == pytest.approx([0.2, 0.4])


def test_an_answer_of_one_read_has_no_tpot() -> None:
    one = record(0, 0.0, output_tokens=5)
    one.output(1000.1, 5)
    assert one.ttft == pytest.approx(0.1)
    assert one.tpot is None


def test_an_answer_that_came_whole_has_no_ttft() -> None:
    one = record(0, 0.0, output_tokens=5)
    assert (one.ttft, one.tpot, one.gaps()) == (None, None, [])
    assert one.single_stream_tps == pytest.approx(50)


def test_all_metrics_of_a_run() -> None:
    records = [
        record(0, 0.0, 0.5, 1.0, 1.5),
        record(1, 1.0, 2.0, 2.2, 2.4),
        record(2, 2.0, status=FAILED, code="E2107", error="E2107 Overloaded: full"),
        record(3, 3.0, status=FAILED, code="HTTP 409", error="busy"),
    ]
    found = compute_metrics(run(*records, ended=1004.0))
    assert (found.completed, found.failed, found.cut) == (2, 2, 0)
    assert found.failures == {"E2107": 1, "HTTP 409": 1}
    assert found.examples["HTTP 409"] == "busy"
    assert found.metrics["ttft"].mean == pytest.approx(0.75)
    assert found.metrics["ttft_from_sending"].mean == pytest.approx(0.65)
    assert found.metrics["e2el"].max == pytest.approx(1.5)
    assert found.metrics["tpot"].mean == pytest.approx((0.5 + 0.2) / 2)
    assert found.metrics["tps_per_user"].mean == pytest.approx((2 + 5) / 2)
    assert found.metrics["itl"].count == 4
    assert found.rates == pytest.approx(
        {
            "requests": 2 / 4,
            "output_tokens": 6 / 4,
            "total_tokens": 26 / 4,
        }
    )


def test_concurrency_is_the_time_in_flight_over_the_run() -> None:
    # In flight from 0.1 to 1 and from 0.6 to 2, of 4 seconds.
    found = compute_metrics(run(record(0, 0.0, 1.0), record(1, 0.5, 2.0), ended=1004.0))
    assert found.concurrency == pytest.approx((0.9 + 1.4) / 4)


@pytest.mark.parametrize(
    ("state", "sent", "says"),
    [
        ({"cpu": 9.5}, 0.001, "it used 95% of a core;"),
        ({"lag": 0.02}, 0.001, "its event loop ran 20 ms late (p99), for others had"),
        ({"lag": 0.02, "cpu": 5.0}, 0.001, "its event loop ran 20 ms late (p99);"),
        ({}, 0.012, "it sent requests 12 ms after they were due (p99), for others had"),
        ({}, 0.009, ""),
    ],
)
def test_a_bottleneck_in_the_generator_is_a_warning(
    state: dict[str, float], sent: float, says: str
) -> None:
    found = compute_metrics(run(record(0, 0.0, 1.0, sent=START + sent), **state))
    assert says in found.warning
    assert bool(found.warning) == bool(says)


GOLDEN = Path(__file__).parent / "golden" / "bench"
TOLD = {"predict_time": 0.9, "tokens_per_second": 3.5, "time_to_first_token": 0.25}


def originals_run() -> tuple[Options, RunResult]:
    """As the sample report of the original cog-triton's README, in small."""
    own = options(
        unit=Unit.BATCH,
        rate=2.0,
        duration=10.0,
        requests=None,
        tps=4.0,
        output_method=OutputMethod.YIELD,
        output_lengths=Lengths.parse("n", "3"),
    )
    return own, run(
        *(
            record(0, 0.0, 0.5, 0.75, 1.0, server=TOLD),
            record(1, 0.0, 0.6, 0.8, 1.1, server=TOLD),
            record(2, 2.1, 2.5, 2.75, 3.1, server=TOLD),
            record(3, 2.1, status=FAILED, code="HTTP 409", error='{"detail": "Already running"}'),
        ),
        notes=["A note of the target"],
    )


def open_run() -> tuple[Options, RunResult]:
    own = options(rate=8.0, duration=30.0, requests=100)
    return own, run(
        record(0, 0.0, 0.5, 1.0),
        record(1, 0.5, 0.7, 1.2, output_tokens=None),
        record(2, 1.0, status=CUT),
        cpu=9.9,
        interrupted=True,
    )


def nothing() -> tuple[Options, RunResult]:
    own = options(requests=1)
    return own, run(record(0, 0.0, status=FAILED, code="timeout", error="no answer"))


CASES = {"original": originals_run, "interrupted": open_run, "nothing": nothing}


@pytest.mark.parametrize("case", CASES)
def test_the_report_is_word_for_word_as_recorded(case: str) -> None:
    own, done = CASES[case]()
    text = report.text(own, compute_metrics(done))
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_json_has_every_metric() -> None:
    own, done = originals_run()
    found = json.loads(report.as_json(own, compute_metrics(done)))
    assert found["schema"] == 2
    assert found["options"]["unit"] == "batch"
    assert found["options"]["api_key"] is None
    (only,) = found["runs"]
    assert (only["rate"], only["completed"], only["failed"]) == (2.0, 3, 1)
    assert only["metrics"]["ttft"]["p50"] == pytest.approx(0.5)
    assert only["metrics"]["server_tps"]["mean"] == 3.5
    assert only["failures"] == {"HTTP 409": 1}


def test_arrivals_depend_on_the_seed_and_end_at_the_first_limit() -> None:
    found = offsets(10.0, 1, duration=1000.0)
    assert found == offsets(10.0, 1, duration=1000.0)
    assert found != offsets(10.0, 2, duration=1000.0)
    assert found[-1] < 1000
    gaps = [b - a for a, b in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert found[:7] == offsets(10.0, 1, duration=1000.0, requests=7)


def test_lengths_are_fixed_or_uniform() -> None:
    assert Lengths.parse("--n", "100") == ("100", 100, 100)
    found, random = Lengths.parse("--n", "uniform:50-200"), Random(3)
    drawn = [found.draw(random) for _ in range(4000)]
    assert (min(drawn), max(drawn)) == (50, 200)
    assert sum(drawn) / len(drawn) == pytest.approx(125, rel=0.03)


class Slow(Target):
    """Takes `seconds` for each request, one after another, as a server with one slot."""

    def __init__(self, seconds: float, most: int = 1, *, broken: bool = False) -> None:
        super().__init__(options(), Client(1))
        self.seconds, self.broken = seconds, broken
        self.slots = asyncio.Semaphore(most)
        self.running = self.most = 0

    async def prepare(self) -> None:
        pass

    async def send(self, prompt: Prompt, record: Record) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with self.slots:
                await asyncio.sleep(self.seconds)
            if self.broken:
                raise Failure("E2107", "full")
            record.output(now(), 1)
            record.output_tokens = 1
        finally:
            self.running -= 1


def loaded(target: Slow, stop_after: float | None = None, **changes: Any) -> list[Record]:
    async def stop(generator: LoadGenerator) -> None:
        while not target.running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(stop_after or 0)
        generator.stop()

    async def main() -> list[Record]:
        own = options(**changes)
        generator = LoadGenerator(own, target)
        if stop_after is not None:
            stopping = asyncio.ensure_future(stop(generator))
        await generator.run(now())
        if stop_after is not None:
            await stopping
        assert generator.done == len(generator.records)
        return generator.records

    return asyncio.run(main())


def test_an_open_loop_does_not_wait_for_a_slow_server() -> None:
    """Without coordinated omission the wait of those behind shows: about 1, 2, 3, ... times."""
    target = Slow(0.05)
    records = loaded(target, requests=6, unit=Unit.RPS, rate=1000.0)
    assert target.most >= 3
    waits = [record.latency for record in records]
    for number, wait in enumerate(waits):
        due = records[number].scheduled - records[0].scheduled
        assert wait >= 0.05 * (number + 1) - due - 0.01
    assert [record.status for record in records] == [OK] * 6


def test_late_sending_counts_in_latency_but_not_from_sending() -> None:
    class Blocking(Slow):
        async def send(self, prompt: Prompt, record: Record) -> None:
            import time

            time.sleep(0.05)  # what a generator must not do
            record.output_tokens = 1

    records = loaded(Blocking(0), unit=Unit.RPS, rate=1000.0, requests=4)
    last = records[-1]
    assert last.latency > 0.15
    assert last.latency - last.service == pytest.approx(last.sent - last.scheduled)


def test_a_batch_starts_when_the_one_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_generator, "_BATCH_PAUSE_S", 0.02)
    target = Slow(0.01, most=99)
    records = loaded(target, unit=Unit.BATCH, rate=3.0, requests=8)
    due = sorted({record.scheduled for record in records})
    sizes = [sum(record.scheduled == at for record in records) for at in due]
    assert sizes == [3, 3, 2]
    assert target.most == 3
    for before, after in itertools.pairwise(due):
        ended = max(record.ended for record in records if record.scheduled == before)
        assert after - ended >= 0.02


@pytest.mark.parametrize("unit", list(Unit))
def test_a_stop_cancels_running_requests(unit: Unit) -> None:
    records = loaded(Slow(60, most=9), 0.1, unit=unit, rate=2.0)
    assert records
    assert {record.status for record in records} == {CUT}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rate": 0.0}, r"--rate=0.0: must be above 0"),
        ({"rate": 1.5, "unit": Unit.BATCH}, r"--rate=1.5: must be a whole number"),
        ({"requests": None}, "one of them must be given"),
        ({"duration": 0.0}, "--duration=0.0: must be above 0"),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        options(**changes)


def test_short_answers_and_unknown_counts_are_noted() -> None:
    records = [
        record(0, 0.0, 1.0, wanted_tokens=5),
        record(1, 0.0, 1.0, output_tokens=None),
    ]
    notes = compute_metrics(run(*records)).notes
    assert "1 of 2 answers have fewer tokens than were asked for" in notes
    assert any("does not tell all token counts" in note for note in notes)
