"""Sending end of a step stream: every item is sent once and in order, whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.backend import step_sender
from cog_triton.backend.step_sender import Ended, Response, StepSender, part_of, split
from cog_triton.engines import step_items
from cog_triton.engines.step_items import StepItem, decode, encode
from cog_triton.engines.step_numbering import HEAD, HEARTBEAT, MAX_HANDLE, RESENT

EPOCH = 1_795_328_576_618_460


class Wire:
    """A sender, and what it sent: responses, and ends with the step that they were told after."""

    def __init__(self) -> None:
        self.sent: list[Response] = []
        self.ends: list[tuple[Ended, int]] = []
        self.sender = StepSender(EPOCH, self.sent.append, self._end)

    def _end(self, ended: Ended, number: int) -> None:
        assert self.sent[-1].numbers[1] == number, "told before its step was sent"
        self.ends.append((ended, number))

    def add(self, *items: StepItem) -> None:
        self.sender.add(part_of(items))

    def heads(self, since: int = 0) -> list[list[int]]:
        heads = [response.numbers[:HEAD].tolist() for response in self.sent[since:]]
        assert {head[0] for head in heads} <= {EPOCH}
        return [head[1:] for head in heads]

    def items(self, since: int = 0) -> list[StepItem]:
        found = []
        for response in self.sent[since:]:
            items = items_of(response)
            assert len(items) == response.numbers[3]
            found += items
        return found


def items_of(response: Response) -> list[StepItem]:
    return decode(response.numbers[HEAD:].tolist(), response.log_probs.tolist(), response.errors)


def token(handle: int, offset: int, end: int = 0) -> StepItem:
    return StepItem(handle, 0, offset, [1000 + offset], [], end)


def test_a_step_is_one_response_with_its_number() -> None:
    wire = Wire()
    wire.add(token(1, 0), token(2, 0))
    wire.add(token(1, 1), token(2, 1, step_items.LENGTH))
    assert wire.heads() == [[1, 0, 2], [2, 0, 2]]
    assert wire.items() == [token(1, 0), token(2, 0), token(1, 1), token(2, 1, step_items.LENGTH)]
    assert wire.ends == [(Ended(2, step_items.LENGTH, 2, None), 2)]
    assert wire.sent[0].numbers.dtype == np.int64
    assert wire.sent[0].log_probs.dtype == np.float32


def test_errors_and_log_probs_are_sent_with_their_items() -> None:
    wire = Wire()
    failed = StepItem(3, 0, 5, [], [], step_items.ERROR, "E2105 gone")
    probable = StepItem(4, 0, 0, [7], [-0.5, -0.75], 0, None, 2, [9])
    wire.add(failed, probable)
    assert wire.items() == [failed, probable]
    assert wire.ends == [(Ended(3, step_items.ERROR, 5, "E2105 gone"), 1)]


def test_log_probs_are_finite_as_json_needs_them() -> None:
    wire = Wire()
    values = [float("-inf"), float("nan"), float("inf"), -1.0]
    wire.add(StepItem(4, 0, 0, [7, 8, 9, 10], values, 0, None, 1))
    assert np.isfinite(wire.sent[0].log_probs).all()
    assert wire.sent[0].log_probs[3] == -1


def test_heartbeats_tell_the_last_number_and_are_not_kept() -> None:
    wire = Wire()
    wire.sender.heartbeat()
    wire.add(token(1, 0))
    wire.sender.heartbeat()
    assert wire.heads() == [[0, HEARTBEAT, 0], [1, 0, 1], [1, HEARTBEAT, 0]]
    wire.sender.resend(0)
    assert wire.heads(3) == [[1, RESENT, 1]]


def test_kept_steps_are_sent_again_in_order() -> None:
    wire = Wire()
    for number in range(5):
        wire.add(token(1, number))
    wire.sender.acknowledge(2)
    assert wire.sender.first_kept(1) == 3
    assert wire.sender.first_kept(4) == 4
    assert wire.sender.first_kept(9) == 9
    wire.sender.resend(1)
    assert wire.heads(5) == [[3, RESENT, 1], [4, RESENT, 1], [5, RESENT, 1]]
    assert wire.items(5) == [token(1, 2), token(1, 3), token(1, 4)]
    wire.add(token(1, 5))
    assert wire.heads(8) == [[6, 0, 1]]
    assert not any(response.numbers[2] for response in wire.sent[:5]), "the kept ones changed"
    wire.sender.acknowledge(6)
    wire.sender.resend(0)
    assert wire.heads(9) == []
    assert wire.sender.first_kept(1) == 7
    assert len(wire.ends) == 0


def test_unacknowledged_steps_are_bounded_and_what_waits_is_merged() -> None:
    wire = Wire()
    for offset in range(2000):
        wire.add(token(1, offset), token(2, offset, step_items.LENGTH if offset == 1999 else 0))
    assert len(wire.sent) == 512
    assert wire.sender.is_full
    assert not wire.ends
    wire.sender.acknowledge(1)
    assert wire.heads(512) == [[513, 0, 2]]
    merged = wire.items(512)
    assert [(item.offset, len(item.ids), item.end) for item in merged] == [
        (512, 1488, 0),
        (512, 1488, step_items.LENGTH),
    ]
    assert wire.ends == [(Ended(2, step_items.LENGTH, 2000, None), 513)]
    wire.sender.acknowledge(513)
    wire.add(token(1, 2000))
    assert wire.heads(513) == [[514, 0, 1]]


def test_ends_that_wait_are_told_when_the_stream_closes() -> None:
    wire = Wire()
    for offset in range(512):
        wire.add(token(1, offset))
    wire.add(token(1, 512), token(2, 0, step_items.LENGTH))
    wire.add(token(1, 513, step_items.CANCELLED), token(3, 0))
    assert wire.ends == []
    told: list[tuple[Ended, int]] = []
    wire.sender._on_end = lambda ended, number: told.append((ended, number))
    wire.sender.close()
    assert told == [
        (Ended(2, step_items.LENGTH, 1, None), 0),
        (Ended(1, step_items.CANCELLED, 514, None), 0),
    ]
    wire.sender.acknowledge(512)
    wire.sender.close()
    assert len(told) == 2
    assert len(wire.sent) == 512


def test_unacknowledged_bytes_are_bounded() -> None:
    wire = Wire()
    for offset in range(0, 200_000_0, 20_000):
        wire.add(StepItem(1, 0, offset, list(range(20_000)), []))
    kept = sum(response.size for response in wire.sent)
    assert 4 << 20 <= kept <= (4 << 20) + (256 << 10)


def test_what_waits_stays_small_while_nobody_acknowledges() -> None:
    wire = Wire()
    for offset in range(10_000):
        wire.add(*(token(handle, offset) for handle in range(4)))
    assert len(wire.sender._waiting) <= 2 * step_sender._MERGE_AT
    for number in range(600):
        wire.sender.acknowledge(number)
    items = wire.items()
    for handle in range(4):
        ids = [token for item in items if item.handle == handle for token in item.ids]
        assert ids == [1000 + offset for offset in range(10_000)]


@pytest.mark.parametrize("width", [0, 1, 3])
def test_a_step_beyond_256_kib_is_several_responses(width: int) -> None:
    wire = Wire()
    count = 100_000
    huge = StepItem(
        1,
        0,
        7,
        list(range(count)),
        [-float(n % 999) for n in range(count * width)],
        step_items.STOP,
        None,
        width,
        [n % 77 for n in range(count * (width - 1))] if width > 1 else (),
    )
    wire.add(token(2, 0), huge, token(3, 0))
    assert all(response.numbers.nbytes <= (256 << 10) + 64 for response in wire.sent)
    assert [head[0] for head in wire.heads()] == list(range(1, len(wire.sent) + 1))
    parts = wire.items()
    assert step_items.merge(parts) == [token(2, 0), huge, token(3, 0)]
    assert wire.ends == [(Ended(1, step_items.STOP, count + 7, None), len(wire.sent))] or wire.ends[
        0
    ][0] == Ended(1, step_items.STOP, count + 7, None)
    assert len(wire.ends) == 1


def test_ticks_count_while_the_oldest_step_is_the_same() -> None:
    wire = Wire()
    assert [wire.sender.ticks_unacknowledged() for _ in range(3)] == [0, 0, 0]
    wire.add(token(1, 0))
    wire.add(token(1, 1))
    assert [wire.sender.ticks_unacknowledged() for _ in range(3)] == [0, 1, 2]
    wire.sender.acknowledge(1)
    assert [wire.sender.ticks_unacknowledged() for _ in range(2)] == [0, 1]
    wire.sender.resend(0)
    wire.sender.heartbeat()
    assert wire.sender.ticks_unacknowledged() == 2
    wire.sender.acknowledge(2)
    assert wire.sender.ticks_unacknowledged() == 0


def test_acknowledging_nonsense_is_harmless() -> None:
    wire = Wire()
    wire.add(token(1, 0))
    for number in (-5, 0, 2**62):
        wire.sender.acknowledge(number)
    wire.add(token(1, 1))
    assert wire.heads() == [[1, 0, 1], [2, 0, 1]]


def test_a_step_is_split_by_stream() -> None:
    other = (5 << 40) + 3
    items = [
        token(1, 0),
        token(other, 4, step_items.STOP),
        StepItem(2, 0, 1, [8, 9], [-1.0, -2.0, -3.0, -4.0], 0, None, 2, [6, 7]),
        StepItem(other + 1, 0, 0, [], [], step_items.ERROR, "E2105 theirs"),
        StepItem(MAX_HANDLE, 0, 0, [], [], step_items.ERROR, "E1005 ours"),
        StepItem(other + 2, 0, 0, [5], [-9.0], 0, None, 1),
    ]
    step = encode(items)
    parts = split(step.items.tolist(), step.log_probs.tolist(), step.errors)
    assert parts.keys() == {0, 5}
    for number, part in parts.items():
        mine = [
            item._replace(handle=item.handle & MAX_HANDLE)
            for item in items
            if item.handle >> 40 == number
        ]
        assert decode(part.ints, part.log_probs, part.errors) == mine
        assert part.count == len(mine)
        assert part.ended == part_of(mine).ended
        assert part.errors == part_of(mine).errors


@pytest.mark.parametrize("stream", [0, 3])
def test_a_step_of_one_stream_is_its_part(stream: int) -> None:
    items = [
        token(1, 0),
        StepItem(2, 0, 1, [8, 9], [-1.0, -2.0, -3.0, -4.0], 0, None, 2, [6, 7]),
        StepItem(5, 0, 7, [], [], step_items.ERROR, "E2105 gone"),
        StepItem(MAX_HANDLE, 0, 2, [5], [-9.0], step_items.STOP, None, 1),
        StepItem(6, 0, 0, [], [], step_items.ERROR, "E1005 no"),
    ]
    step = encode(item._replace(handle=stream << 40 | item.handle) for item in items)
    parts = split(step.items.tolist(), step.log_probs.tolist(), step.errors)
    ((number, part),) = parts.items()
    assert number == stream
    assert decode(part.ints, part.log_probs, part.errors) == items
    assert (part.count, part.ended) == (len(items), part_of(items).ended)
    assert split([], [], []) == {}


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40)),
        st.tuples(st.just("ack"), st.integers(0, 60)),
        st.tuples(st.just("resend"), st.integers(0, 60)),
        st.tuples(st.just("beat"), st.just(0)),
    ),
    max_size=120,
)


@given(ACTIONS, st.integers(1, 9))
def test_every_token_is_sent_once_and_in_order(actions: Any, kept: int) -> None:
    """Whatever is acknowledged or sent again: new steps have consecutive numbers and offsets."""
    limit, step_sender._MAX_KEPT_STEPS = step_sender._MAX_KEPT_STEPS, kept
    try:
        wire, made = Wire(), 0
        for what, value in actions:
            if what == "add":
                for _ in range(value):
                    wire.add(*(token(handle, made) for handle in range(3)))
                    made += 1
            elif what == "ack":
                wire.sender.acknowledge(value)
            elif what == "resend":
                wire.sender.resend(value)
            else:
                wire.sender.heartbeat()
        for number in range(5000):
            wire.sender.acknowledge(number)
    finally:
        step_sender._MAX_KEPT_STEPS = limit
    new = [response for response in wire.sent if not response.numbers[2]]
    assert [int(response.numbers[1]) for response in new] == list(range(1, len(new) + 1))
    for handle in range(3):
        mine = [item for response in new for item in items_of(response) if item.handle == handle]
        ids = [each for item in mine for each in item.ids]
        assert ids == [1000 + offset for offset in range(made)]
        assert [item.offset for item in mine] == [
            sum(len(before.ids) for before in mine[:place]) for place in range(len(mine))
        ]
    by_number = {int(response.numbers[1]): items_of(response) for response in new}
    for response in wire.sent:
        if response.numbers[2] & RESENT:
            assert items_of(response) == by_number[int(response.numbers[1])]
