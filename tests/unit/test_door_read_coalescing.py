"""Pauses of the door's event loop while pieces of streams are many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cog_triton.door import relay
from cog_triton.door.relay import ReadCoalescing


@dataclass
class Loop:
    """A clock, and an event loop that has turns when told."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)
    ready: list[Callable[[], None]] = field(default_factory=list)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.ready.append(callback)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def turn(self) -> None:
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(relay, "time", loop)
    return loop


def passes(found: ReadCoalescing, loop: Loop, pieces: int, per_second: float) -> None:
    """Let pieces come at a rate; what came during a pause is passed on after it."""
    arrivals = deque(loop.now + number / per_second for number in range(1, pieces + 1))
    while arrivals:
        loop.now = max(loop.now, arrivals[0])
        while arrivals and arrivals[0] <= loop.now:
            arrivals.popleft()
            found.count()
        loop.turn()


def test_few_pieces_make_no_pause(loop: Loop) -> None:
    passes(ReadCoalescing(loop), loop, 1000, 500)  # type: ignore[arg-type]
    assert loop.slept == []


def test_many_pieces_are_passed_on_once_a_millisecond(loop: Loop) -> None:
    found = ReadCoalescing(loop)  # type: ignore[arg-type]
    passes(found, loop, 200, 6400)
    loop.slept.clear()
    began = loop.now
    passes(found, loop, 640, 6400)
    assert len(loop.slept) == pytest.approx((loop.now - began) / 0.001, abs=2)
    assert max(loop.slept) == pytest.approx(0.001)


def test_turns_that_come_late_make_no_pause(loop: Loop) -> None:
    found = ReadCoalescing(loop)  # type: ignore[arg-type]
    for _ in range(100):
        loop.now += 0.0015
        for _ in range(10):
            found.count()
        loop.turn()
    assert loop.slept == []


def test_pauses_end_when_pieces_become_few(loop: Loop) -> None:
    found = ReadCoalescing(loop)  # type: ignore[arg-type]
    passes(found, loop, 200, 6400)
    passes(found, loop, 200, 100)
    loop.slept.clear()
    passes(found, loop, 200, 100)
    assert loop.slept == []


def test_a_request_puts_pauses_off(loop: Loop) -> None:
    found = ReadCoalescing(loop)  # type: ignore[arg-type]
    passes(found, loop, 200, 6400)
    loop.slept.clear()
    found.hurry()
    passes(found, loop, 15, 6400)
    assert loop.slept == []
    passes(found, loop, 20, 6400)
    assert loop.slept
