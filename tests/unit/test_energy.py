"""Energy of the GPUs: what is shared adds up to the counter, by the tokens of each request."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cuda_driver import gpu_driver, has_compiler
from prometheus_client import CollectorRegistry, generate_latest

from cog_triton.serving.admission import Admission, Ticket
from cog_triton.serving.fair_queue import Queued
from cog_triton.serving.telemetry.energy import EnergyMeter


class Running(Queued):
    """A request that has made `tokens`."""

    def __init__(self, prompt: int = 0) -> None:
        super().__init__(prompt_tokens=prompt)
        self.tokens = 0
        self.made = lambda: self.tokens


@dataclass
class Board:
    """A counter of joules, and a clock."""

    joules: float = 1000.0
    now: float = 5.0

    def passes(self, meter: EnergyMeter, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += seconds * watts
        meter.share()


def metered(*running: Queued) -> tuple[Board, EnergyMeter, list[Queued]]:
    board, live = Board(), list(running)
    return board, EnergyMeter(lambda: board.joules, lambda: live, lambda: board.now), live


def test_shares_are_as_tokens_and_add_up_to_the_counter() -> None:
    one, other = Running(), Running()
    board, meter, live = metered()
    board.passes(meter, 10, 100)  # idle
    live += [one, other]
    for _ in range(20):
        one.tokens += 30
        other.tokens += 10
        board.passes(meter, 0.5, 700)
    live.clear()
    first, second = meter.settle(one), meter.settle(other)
    assert first == pytest.approx(3 * second)
    assert first + second == pytest.approx(20 * 0.5 * 600)
    assert meter.idle == pytest.approx(1000 + 20 * 0.5 * 100)
    assert meter.idle + meter.generation == pytest.approx(board.joules - 1000)


def test_a_request_that_ends_between_two_looks_gets_its_share() -> None:
    """Its last tokens by the last rate, which the next interval makes up for."""
    long, short = Running(), Running()
    board, meter, live = metered(long, short)
    long.tokens = short.tokens = 10
    board.passes(meter, 1, 400)
    short.tokens = long.tokens = 20
    live.remove(short)
    bill = meter.settle(short)
    assert bill == pytest.approx(200 + 200)
    board.passes(meter, 1, 300)
    live.clear()
    assert bill + meter.settle(long) == pytest.approx(700)
    assert meter.generation == pytest.approx(700)


def test_a_prompt_counts_once_it_was_read_and_who_waits_pays_nothing() -> None:
    reading, made = Running(prompt=90), Running()
    board, meter, _ = metered(reading, made)
    made.tokens = 100
    board.passes(meter, 1, 500)
    reading.tokens = 10
    board.passes(meter, 1, 500)
    assert meter.settle(made) == pytest.approx(500)
    assert meter.settle(reading) == pytest.approx(500)
    assert meter.settle(Running(prompt=1000)) == 0


def test_a_counter_that_begins_anew_takes_nothing_back() -> None:
    board, meter, _ = metered()
    board.passes(meter, 1, 100)
    board.joules = 0
    meter.share()
    board.passes(meter, 1, 50)
    assert meter.idle == pytest.approx(150)


def test_metric_has_both_parts_under_one_name() -> None:
    board, meter, _ = metered()
    registry = CollectorRegistry()
    registry.register(meter)
    board.passes(meter, 2, 100)
    text = generate_latest(registry).decode()
    assert 'cog_triton_gpu_energy_joules_total{part="idle"} 200.0' in text
    assert 'cog_triton_gpu_energy_joules_total{part="generation"} 0.0' in text
    assert text.count("# TYPE") == 1


def test_a_ticket_is_settled_once_and_only_after_its_turn() -> None:
    admission, settled = Admission(1), []
    admission.settle = lambda ticket: settled.append(ticket) or 7.0  # type: ignore[func-returns-value]
    first, second = Ticket(), Ticket()
    for ticket in (first, second):
        admission.enter(ticket, lambda: None)
    assert list(admission.tickets()) == [first]
    admission.leave(second)  # it has only waited
    admission.leave(first)
    admission.leave(first)
    assert (settled, first.joules, second.joules) == ([first], 7.0, 0.0)


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
@pytest.mark.parametrize(("hides", "expected"), [("0", True), ("", False)])
def test_the_driver_tells_joules_of_the_visible_gpus(
    tmp_path: Path, hides: str, expected: bool
) -> None:
    program = """
import time
from cog_triton.system.gpus import energy_counter
read = energy_counter()
if read:
    began, before, at = time.monotonic(), read(), time.monotonic()
    time.sleep(0.2)
    until, after, ended = time.monotonic(), read(), time.monotonic()
    print((after - before) / (ended - began), (after - before) / (until - at))
"""
    given = gpu_driver(tmp_path, gpu_watts=300, gpu_count=2)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**given, "CUDA_VISIBLE_DEVICES": hides, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=True,
    )
    if not expected:
        assert not done.stdout
        return
    least, most = map(float, done.stdout.split())  # by the longest and the shortest time of it
    assert least * 0.9 < 600 < most * 1.1
