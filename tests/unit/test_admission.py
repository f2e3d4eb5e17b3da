"""The engine's admission: at most so many inside, first come first served, nobody forgotten."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.errors import Overloaded, TritonUnavailable
from cog_triton.serving.admission import Admission, Ticket, admission_for
from cog_triton.settings import load_settings

PATIENCE_S = 10


class Guest:
    """A thread that goes in, stays until it may leave, and keeps what it was refused with."""

    def __init__(self, admission: Admission) -> None:
        self.ticket = Ticket()
        self.inside, self.may_leave = Event(), Event()
        self.error: Exception | None = None
        self._admission = admission
        self.thread = threading.Thread(target=self._visit)
        self.thread.start()

    def _visit(self) -> None:
        try:
            with self._admission.slot(self.ticket):
                self.ticket.on_end(self.may_leave.set)
                self.inside.set()
                assert self.may_leave.wait(PATIENCE_S)
                self.ticket.raise_error()
        except (Overloaded, TritonUnavailable) as error:
            self.error = error

    def leave(self) -> None:
        self.may_leave.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def until(condition: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def full(slots: int, waiting: int, queue: float = 10):
    """A admission with every slot taken and a line before it."""
    admission = Admission(slots, queue)
    guests = []
    try:
        for place in range(slots + waiting):
            guests.append(Guest(admission))
            until(lambda place=place: admission.running + admission.waiting == place + 1)
        yield admission, guests[:slots], guests[slots:]
    finally:
        for guest in guests:
            guest.ticket.cancel()
            guest.leave()
    assert (admission.running, admission.waiting) == (0, 0)


def test_no_more_than_the_slots_are_inside() -> None:
    with full(2, 3) as (admission, inside, line):
        assert (admission.running, admission.waiting) == (2, 3)
        assert all(guest.inside.wait(PATIENCE_S) for guest in inside)
        assert not any(guest.inside.is_set() for guest in line)


def test_who_comes_first_goes_in_first() -> None:
    with full(1, 3) as (_, (first,), line):
        first.leave()
        for place, guest in enumerate(line):
            assert guest.inside.wait(PATIENCE_S)
            assert not any(later.inside.is_set() for later in line[place + 1 :])
            guest.leave()


def test_beyond_the_queue_it_is_told_what_runs_and_waits() -> None:
    with full(2, 3, queue=3) as (admission, inside, _):
        with pytest.raises(Overloaded) as caught, admission.slot(Ticket()):
            pass
        for words in ("2 predictions run", "3 wait", "MAX_QUEUE", "try again"):
            assert words in caught.value.detail
        inside[0].leave()
        late = Guest(admission)
        until(lambda: admission.waiting == 3)
        late.ticket.cancel()
        late.leave()


def test_without_a_queue_only_the_slots_count() -> None:
    with (
        full(1, 0, queue=0) as (admission, _, _),
        pytest.raises(Overloaded),
        admission.slot(Ticket()),
    ):
        pass


def test_who_is_cancelled_while_waiting_leaves_the_line_at_once() -> None:
    with full(1, 3) as (admission, (first,), line):
        line[1].ticket.cancel()
        line[1].thread.join(PATIENCE_S)
        assert isinstance(line[1].error, TritonUnavailable)
        assert not line[1].inside.is_set()
        assert admission.waiting == 2
        first.leave()
        assert line[0].inside.wait(PATIENCE_S)
        line[0].leave()
        assert line[2].inside.wait(PATIENCE_S)


def test_closing_ends_who_is_inside_and_who_waits_and_who_comes() -> None:
    with full(2, 2) as (admission, inside, line):
        admission.close(TritonUnavailable("it has died"))
        for guest in (*inside, *line):
            guest.thread.join(PATIENCE_S)
            assert "it has died" in str(guest.error)
        with pytest.raises(TritonUnavailable, match="it has died"), admission.slot(Ticket()):
            pass
        admission.open()
        with admission.slot(Ticket()):
            assert admission.running == 1


def test_errors_are_not_shared_between_threads() -> None:
    with full(1, 1) as (admission, (first,), (second,)):
        admission.close(TritonUnavailable("it has died"))
        first.thread.join(PATIENCE_S)
        second.thread.join(PATIENCE_S)
        assert first.error is not second.error


def test_refusing_lets_who_is_there_go_on() -> None:
    with full(1, 1) as (admission, (first,), (second,)):
        admission.reject_new(TritonUnavailable("stopping"))
        with pytest.raises(TritonUnavailable, match="stopping"), admission.slot(Ticket()):
            pass
        first.leave()
        assert second.inside.wait(PATIENCE_S)
        assert first.error is None
        assert admission.wait_until_idle(0.01) is False
        with ThreadPoolExecutor() as pool:
            idle = pool.submit(admission.wait_until_idle, PATIENCE_S)
            second.leave()
            assert idle.result() is True


def test_what_was_cancelled_before_it_came_holds_nothing() -> None:
    with full(1, 0) as (admission, _, _):
        ticket = Ticket()
        ticket.cancel()
        with pytest.raises(TritonUnavailable), admission.slot(ticket):
            pass
        assert admission.waiting == 0


def test_queue_time() -> None:
    with full(1, 1) as (_, (first,), (second,)):
        assert first.ticket.queue_time == 0
        assert second.ticket.queue_time is None
        time.sleep(0.02)
        first.leave()
        assert second.inside.wait(PATIENCE_S)
        assert second.ticket.queue_time is not None
        assert second.ticket.queue_time >= 0.02


def test_an_error_inside_frees_the_slot() -> None:
    admission = Admission(1, 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.slot(Ticket()):
            raise ZeroDivisionError
    assert admission.running == 0


def test_the_first_reason_is_the_one_that_is_told() -> None:
    ticket = Ticket()
    ticket.fail(TritonUnavailable("first"))
    ticket.fail(TritonUnavailable("second"))
    with pytest.raises(TritonUnavailable, match="first"):
        ticket.raise_error()


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.data())
def test_many_that_come_go_and_are_cancelled_leave_an_empty_door(
    slots: int, data: st.DataObject
) -> None:
    admission = Admission(slots, 8)
    cancelled = data.draw(st.sets(st.integers(0, 29)))
    most = 0

    def visit(number: int) -> None:
        nonlocal most
        ticket = Ticket()
        if number in cancelled:
            threading.Timer(0.0005 * (number % 4), ticket.cancel).start()
        try:
            with admission.slot(ticket):
                most = max(most, admission.running)
                time.sleep(0.001)
        except (Overloaded, TritonUnavailable):
            pass

    with ThreadPoolExecutor(30) as pool:
        list(pool.map(visit, range(30)))
    assert most <= slots
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("cog", "concurrency", "queue", "expected"),
    [
        (256, None, None, (16, 64)),
        (32, None, None, (16, 8)),
        (1, None, None, (16, 0)),
        (256, 4, None, (4, 64)),
        (256, None, 3, (16, 3)),
        (256, None, 0, (16, 0)),
        (256, 40, 20, (40, 20)),
    ],
)
def test_slots_and_queue(
    cog: int, concurrency: int | None, queue: int | None, expected: tuple[int, int]
) -> None:
    given = load_settings(cog_max_concurrency=cog, max_concurrency=concurrency, max_queue=queue)
    admission = admission_for(given, 16)
    assert (admission.slots, admission.max_queue) == expected


@pytest.mark.parametrize(
    ("cog", "queue", "needed"), [(256, None, None), (106, 64, 107), (107, 64, None), (16, None, 22)]
)
def test_a_cog_that_would_answer_409_first_is_told_of(
    cog: int, queue: int | None, needed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    admission_for(load_settings(cog_max_concurrency=cog, max_queue=queue), 16)
    said = caplog.text
    assert bool(said) is bool(needed)
    if needed:
        assert f"COG_MAX_CONCURRENCY={cog}" in said
        assert f"{needed} or more" in said
