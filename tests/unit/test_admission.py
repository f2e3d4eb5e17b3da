"""Admission control: concurrency limit, FIFO queue, cancellation, rejection."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_thread import OnLoop
from scripted_server import wait_until

from cog_triton.errors import FatalRequest, Overloaded, TritonUnavailable
from cog_triton.serving.admission import Admission, admission_for
from cog_triton.serving.ticket import Ticket
from cog_triton.settings import load_settings

PATIENCE_S = 60


@contextmanager
def slot(admission: OnLoop, ticket: Ticket) -> Iterator[None]:
    """Wait for a slot on this thread, and hold it, unless the ticket ends before."""
    woken = Event()
    try:
        admission.enter(ticket, woken.set)
        ticket.on_end(woken.set)
        assert ticket.queue_time is not None or woken.wait(PATIENCE_S)
        ticket.raise_error()
        if ticket.ended:
            raise TritonUnavailable("cancelled")
        yield
    finally:
        admission.leave(ticket)


class Request:
    """A thread that takes a slot until told to leave, and keeps the error it was rejected with."""

    def __init__(self, admission: OnLoop) -> None:
        self.ticket = Ticket()
        self.running, self.may_finish = Event(), Event()
        self.error: Exception | None = None
        self._admission = admission
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with slot(self._admission, self.ticket):
                self.ticket.on_end(self.may_finish.set)
                self.running.set()
                assert self.may_finish.wait(PATIENCE_S)
                self.ticket.raise_error()
        except (Overloaded, TritonUnavailable) as error:
            self.error = error

    def finish(self) -> None:
        self.may_finish.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextmanager
def full(slots: int, waiting: int, queue: float = 10):
    """Admission control with every slot taken, and a queue."""
    admission = OnLoop(Admission(slots, queue))
    requests = []
    try:
        for place in range(slots + waiting):
            requests.append(Request(admission))
            wait_until(lambda place=place: admission.running + admission.waiting == place + 1)
        yield admission, requests[:slots], requests[slots:]
    finally:
        for request in requests:
            request.ticket.cancel()
            request.finish()
    assert (admission.running, admission.waiting) == (0, 0)


def test_at_most_slots_requests_run() -> None:
    with full(2, 3) as (admission, running, queued):
        assert (admission.running, admission.waiting) == (2, 3)
        assert all(request.running.wait(PATIENCE_S) for request in running)
        assert not any(request.running.is_set() for request in queued)


def test_queue_is_first_in_first_out() -> None:
    with full(1, 3) as (_, (first,), queued):
        first.finish()
        for place, request in enumerate(queued):
            assert request.running.wait(PATIENCE_S)
            assert not any(later.running.is_set() for later in queued[place + 1 :])
            request.finish()


@pytest.mark.parametrize("queue", [0, 3])
def test_full_queue_raises_overloaded_with_counts(queue: int) -> None:
    with full(2, queue, queue=queue) as (admission, running, _):
        with pytest.raises(Overloaded) as caught, slot(admission, Ticket()):
            pass
        for words in ("2 predictions run", f"{queue} wait", "MAX_QUEUE", "try again"):
            assert words in caught.value.detail
        running[0].finish()
        late = Request(admission)
        wait_until(lambda: admission.running + admission.waiting == 2 + queue)
        late.ticket.cancel()
        late.finish()


def test_cancelling_a_queued_request_removes_it() -> None:
    with full(1, 3) as (admission, (first,), queued):
        queued[1].ticket.cancel()
        queued[1].thread.join(PATIENCE_S)
        assert isinstance(queued[1].error, TritonUnavailable)
        assert not queued[1].running.is_set()
        assert admission.waiting == 2
        first.finish()
        assert queued[0].running.wait(PATIENCE_S)
        queued[0].finish()
        assert queued[2].running.wait(PATIENCE_S)


def test_close_fails_running_queued_and_new_requests() -> None:
    with full(2, 2) as (admission, running, queued):
        admission.close(TritonUnavailable("it has died"))
        for request in (*running, *queued):
            request.thread.join(PATIENCE_S)
            assert "it has died" in str(request.error)
        assert len({id(request.error) for request in (*running, *queued)}) == 4
        with pytest.raises(TritonUnavailable, match="it has died"), slot(admission, Ticket()):
            pass
        admission.open()
        with slot(admission, Ticket()):
            assert admission.running == 1


def test_reject_new_lets_running_and_queued_requests_finish() -> None:
    with full(1, 1) as (admission, (first,), (second,)):
        admission.reject_new(TritonUnavailable("stopping"))
        with pytest.raises(TritonUnavailable, match="stopping"), slot(admission, Ticket()):
            pass
        first.finish()
        assert second.running.wait(PATIENCE_S)
        assert first.error is None
        assert admission.wait_until_idle(0.01) is False
        with ThreadPoolExecutor() as pool:
            idle = pool.submit(admission.wait_until_idle, PATIENCE_S)
            second.finish()
            assert idle.result() is True


def test_reject_new_outlasts_a_restart_of_the_engine() -> None:
    with full(1, 1) as (admission, (first,), _):
        admission.reject_new(TritonUnavailable("stopping"))
        admission.pause(TritonUnavailable("died"))
        admission.open()
        assert first.error is None
        with pytest.raises(TritonUnavailable, match="stopping"), slot(admission, Ticket()):
            pass


def test_cancelled_before_admission_takes_no_place() -> None:
    with full(1, 0) as (admission, _, _):
        ticket = Ticket()
        ticket.cancel()
        with pytest.raises(TritonUnavailable), slot(admission, ticket):
            pass
        assert admission.waiting == 0


def test_queue_time_is_measured_until_admission() -> None:
    with full(1, 1) as (_, (first,), (second,)):
        assert first.ticket.queue_time == 0
        assert second.ticket.queue_time is None
        time.sleep(0.02)
        first.finish()
        assert second.running.wait(PATIENCE_S)
        assert second.ticket.queue_time is not None
        assert second.ticket.queue_time >= 0.02


def test_turn_is_told_once_the_ticket_has_a_queue_time() -> None:
    admission = OnLoop(Admission(1, 2))
    turns: list[tuple[int, float | None]] = []
    tickets = [Ticket() for _ in range(3)]
    for number, ticket in enumerate(tickets):
        admission.enter(ticket, lambda n=number, t=ticket: turns.append((n, t.queue_time)))
    assert tickets[0].queue_time == 0
    assert turns == []
    admission.leave(tickets[0])
    assert [number for number, _ in turns] == [1]
    assert turns[0][1] is not None
    admission.leave(tickets[2])
    admission.leave(tickets[1])
    assert len(turns) == 1
    assert (admission.running, admission.waiting) == (0, 0)


def test_leaving_without_a_place_is_no_error() -> None:
    with full(1, 1) as (admission, _, _):
        rejected = Ticket()
        admission.leave(rejected)
        assert (admission.running, admission.waiting) == (1, 1)


def test_turn_may_leave_at_once() -> None:
    """What the turn calls may give the slot back."""
    admission = Admission(1, 5)
    first, *queued = (Ticket() for _ in range(6))
    admission.enter(first, lambda: None)
    for ticket in queued:
        admission.enter(ticket, lambda ticket=ticket: admission.leave(ticket))
    admission.leave(first)
    assert (admission.running, admission.waiting) == (0, 0)


def test_exception_frees_the_slot() -> None:
    admission = OnLoop(Admission(1, 0))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), slot(admission, Ticket()):
            raise ZeroDivisionError
    assert admission.running == 0


def test_first_error_of_a_ticket_wins() -> None:
    ticket = Ticket()
    ticket.fail(TritonUnavailable("first"))
    ticket.fail(TritonUnavailable("second"))
    with pytest.raises(TritonUnavailable, match="first"):
        ticket.raise_error()


@given(st.integers(1, 4), st.data())
def test_random_arrivals_and_cancellations_leave_no_slot_taken(
    slots: int, data: st.DataObject
) -> None:
    admission = OnLoop(Admission(slots, 8))
    cancelled = data.draw(st.sets(st.integers(0, 29)))
    most = 0

    def run(number: int) -> None:
        nonlocal most
        ticket = Ticket()
        if number in cancelled:
            threading.Timer(0.0005 * (number % 4), ticket.cancel).start()
        try:
            with slot(admission, ticket):
                most = max(most, admission.running)
                time.sleep(0.001)
        except (Overloaded, TritonUnavailable):
            pass

    with ThreadPoolExecutor(30) as pool:
        list(pool.map(run, range(30)))
    assert most <= slots
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("concurrency", "queue", "expected"),
    [
        (None, None, (32, 128)),
        (4, None, (4, 64)),
        (None, 3, (32, 3)),
        (None, 0, (32, 0)),
        (40, 20, (40, 20)),
    ],
)
def test_limits_follow_batch_size_and_settings(
    concurrency: int | None, queue: int | None, expected: tuple[int, int]
) -> None:
    given = load_settings(max_concurrency=concurrency, max_queue=queue)
    admission = admission_for(given, 32)
    assert (admission.slots, admission.max_queue) == expected


@pytest.mark.parametrize(("cog", "told"), [(15, True), (16, False)])
def test_warns_when_cog_max_concurrency_is_too_low(
    cog: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    admission_for(load_settings(cog_max_concurrency=cog), 16)
    assert ("COG_MAX_CONCURRENCY=15: the engine takes 16 at once" in caplog.text) is told


@pytest.mark.parametrize(
    ("suspected", "told"),
    [(2, "died 3 times when it got this request"), (3, "died 4 times when it got this request, 3")],
)
def test_fatal_request_is_told_every_death(suspected: int, told: str) -> None:
    admission, ticket = Admission(1, 1), Ticket()
    admission.enter(ticket, lambda: None)
    ticket.blamed, ticket.suspected, ticket.exposed = 2, suspected, True
    admission.pause(TritonUnavailable("the engine has died"))
    assert isinstance(ticket.error, FatalRequest)
    assert f"the engine {told}" in ticket.error.detail
    admission.leave(ticket)
