"""Admission control: concurrency limit, FIFO queue, cancellation, rejection."""

from __future__ import annotations

import pytest
from loop_thread import OnLoop

from cog_triton.errors import FatalRequest, Overloaded, TritonUnavailable
from cog_triton.serving.admission import Admission, admission_for
from cog_triton.serving.ticket import Ticket
from cog_triton.settings import load_settings


def entered(admission: Admission, count: int = 1) -> list[Ticket]:
    """Requests that run or wait for their turn."""
    tickets = [Ticket() for _ in range(count)]
    for ticket in tickets:
        admission.enter(ticket, int)
    return tickets


def running(tickets: list[Ticket]) -> list[bool]:
    return [ticket.queue_time is not None for ticket in tickets]


def test_the_queue_is_first_in_first_out() -> None:
    admission = Admission(2, 10)
    tickets = entered(admission, 5)
    assert (admission.running, admission.waiting) == (2, 3)
    for place, ticket in enumerate(tickets):
        assert running(tickets) == [number < place + 2 for number in range(5)]
        admission.leave(ticket)
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize("queue", [0, 3])
def test_a_full_queue_raises_overloaded_with_counts(queue: int) -> None:
    admission = Admission(2, queue)
    first, *_ = entered(admission, 2 + queue)
    with pytest.raises(Overloaded) as caught:
        entered(admission)
    for words in ("2 predictions run", f"{queue} wait", "MAX_QUEUE"):
        assert words in caught.value.detail
    admission.leave(Ticket())  # which had no place
    assert (admission.running, admission.waiting) == (2, queue)
    admission.leave(first)
    entered(admission)
    assert (admission.running, admission.waiting) == (2, queue)


def test_a_cancelled_request_leaves_the_queue() -> None:
    admission = Admission(1, 10)
    first, *queued = entered(admission, 4)
    queued[1].cancel()
    assert queued[1].ended
    admission.leave(queued[1])
    assert admission.waiting == 2
    admission.leave(first)
    admission.leave(queued[0])
    assert running(queued) == [True, False, True]


def test_who_asks_late_hears_of_the_end_of_a_ticket_at_once() -> None:
    ticket, ends = Ticket(), list[str]()
    ticket.on_end(lambda: ends.append("first"))
    assert ends == []
    ticket.cancel()
    ticket.on_end(lambda: ends.append("late"))
    assert ends == ["first", "late"]


def test_close_fails_running_queued_and_new_requests() -> None:
    admission = Admission(2, 10)
    tickets = entered(admission, 4)
    admission.close(TritonUnavailable("it has died"))
    found = []
    for ticket in tickets:
        with pytest.raises(TritonUnavailable, match="it has died") as caught:
            ticket.raise_error()
        found.append(caught.value)
    assert len({id(error) for error in found}) == 4, "each has a traceback of its own"
    with pytest.raises(TritonUnavailable, match="it has died"):
        entered(admission)
    for ticket in tickets:
        admission.leave(ticket)
    admission.open()
    entered(admission)
    assert admission.running == 1


def test_reject_new_lets_running_and_queued_requests_finish() -> None:
    own = Admission(1, 10)
    admission = OnLoop(own)
    first, second = entered(own, 2)
    admission.reject_new(TritonUnavailable("stopping"))
    admission.pause(TritonUnavailable("died"))
    admission.open()
    with pytest.raises(TritonUnavailable, match="stopping"):
        entered(own)
    admission.leave(first)
    assert running([second]) == [True]
    assert (first.error, second.error) == (None, None)
    assert admission.wait_until_idle(0.01) is False
    admission.leave(second)
    assert admission.wait_until_idle(60) is True


def test_turn_is_told_once_the_ticket_has_a_queue_time() -> None:
    admission = Admission(1, 2)
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
