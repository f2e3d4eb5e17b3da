"""Load generator: arrival schedules, length distributions, prompts, and the three kinds of load."""

from __future__ import annotations

import asyncio
import itertools
from random import Random
from typing import Any

import pytest
from bench_runs import options

from cog_triton.bench import load_generator
from cog_triton.bench.http_client import Client, now
from cog_triton.bench.load_generator import LoadGenerator, offsets
from cog_triton.bench.options import Lengths, Prompt, Unit, make_prompt
from cog_triton.bench.request_record import CUT, OK, Record
from cog_triton.bench.targets import Failure, Target
from cog_triton.errors import InvalidArgument


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


@pytest.mark.parametrize("text", ["", "0", "1.5", "uniform:9-3", "uniform:0-3", "normal:100,20"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--n='{text}': must be N or uniform"):
        Lengths.parse("--n", text)


def test_prompts_depend_on_seed_and_request_number() -> None:
    one = make_prompt(options(seed=5), 0)
    assert make_prompt(options(seed=5), 0) == one
    assert make_prompt(options(seed=5), 1) != one
    assert make_prompt(options(seed=6), 0) != one
    assert len(one.text.split()) == 10
    assert one.ids is not None
    assert len(one.ids) == 10
    assert one.output_tokens == 5


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


def test_closed_loop_users_send_again_once_answered() -> None:
    target = Slow(0.005, most=99)
    records = loaded(target, unit=Unit.CONCURRENCY, rate=3.0, requests=20)
    assert target.most == 3
    assert sorted(record.index for record in records) == list(range(20))


def test_a_duration_ends_sending_and_lets_running_requests_end() -> None:
    records = loaded(
        Slow(0.6, most=99), unit=Unit.CONCURRENCY, rate=2.0, requests=None, duration=1.0
    )
    assert 2 <= len(records) <= 4
    assert all(record.status == OK for record in records)


def test_users_pause_after_a_failure() -> None:
    target = Slow(0, broken=True)
    records = loaded(target, unit=Unit.CONCURRENCY, rate=1.0, requests=None, duration=1.0)
    assert 1 <= len(records) <= 10
    assert {record.code for record in records} == {"E2107"}


@pytest.mark.parametrize("unit", list(Unit))
def test_a_request_that_cannot_be_made_ends_the_load_by_its_code(unit: Unit) -> None:
    class Refusing(Slow):
        async def send(self, prompt: Prompt, record: Record) -> None:
            raise InvalidArgument("cannot be made")

    with pytest.raises(InvalidArgument, match="cannot be made"):
        loaded(Refusing(0), unit=unit, rate=2.0)


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
