"""Numbering of a step stream: none is lost and none doubled, whatever the way between loses."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cog_triton.backend.step_sender import Response, StepSender, part_of
from cog_triton.engines.step_items import StepItem, decode
from cog_triton.engines.step_numbering import (
    HEAD,
    HEARTBEAT,
    RESENT,
    Head,
    StepAccount,
    read_head,
)
from cog_triton.errors import TritonMalformedEvent


class Link:
    """Both ends of a stream; what is between them is lost, doubled or late as a test says."""

    def __init__(self) -> None:
        self.between: deque[Response] = deque()
        self.sender = StepSender(7, self.between.append, lambda ended, number: None)
        self.account = StepAccount()
        self.made = 0
        self.dealt: list[StepItem] = []
        self.now = 0.0

    def make(self) -> None:
        """The engine makes a step, of its number as the token."""
        self.sender.add(part_of([StepItem(1, 0, self.made, [self.made], [])]))
        self.made += 1

    def arrive(self, response: Response) -> None:
        self.now += 1.0
        step = response.numbers.tolist()
        head = read_head(step)
        if self.account.take(head, self.now):
            items = decode(step[HEAD:])
            assert len(items) == head.items
            self.dealt += items

    def ask(self, *, answered: bool = True) -> None:
        """Send what the account asks for; without an answer, it was lost on its way."""
        missing, self.account.missing = self.account.missing, None
        number = self.account.acknowledgement(self.now)
        if missing is not None and answered:
            assert self.account.resent_from(self.sender.first_kept(missing)) == 0
            self.sender.resend(missing)
        if number is not None:
            if answered:
                self.sender.acknowledge(number)
            self.account.acknowledged(number if answered else None)


ACTIONS = st.lists(
    st.sampled_from(["make", "arrive", "lose", "double", "late", "beat", "ask", "ask in vain"]),
    max_size=200,
)


@settings(deadline=None)
@given(ACTIONS)
def test_each_token_is_dealt_out_once_and_in_order(actions: list[str]) -> None:
    link = Link()
    for what in actions:
        if what == "make":
            link.make()
        elif what == "beat":
            link.sender.heartbeat()
        elif what.startswith("ask"):
            link.ask(answered=what == "ask")
        elif link.between and what == "lose":
            link.between.popleft()
        elif link.between and what == "double":
            link.between.append(link.between[0])
        elif link.between and what == "late":
            link.between.rotate(-1)
        elif link.between:
            link.arrive(link.between.popleft())
        assert [item.ids[0] for item in link.dealt] == list(range(len(link.dealt)))
    for _ in range(3):  # then nothing is lost any more
        link.sender.heartbeat()
        while link.between:
            link.arrive(link.between.popleft())
            link.ask()
    assert [item.ids[0] for item in link.dealt] == list(range(link.made))
    assert link.account.acknowledgement(link.now + 1) is None


def test_steps_that_are_gone_are_counted_and_the_next_is_dealt_out() -> None:
    account = StepAccount()
    assert account.take(Head(1, 1), 0.0)
    assert not account.take(Head(1, 5), 0.0)
    assert account.missing == 2
    assert account.resent_from(4) == 2
    assert account.resent_from(2) == 0
    assert account.take(Head(1, 4, RESENT), 0.1)
    assert not account.take(Head(1, 3, RESENT), 0.1)


def test_what_is_missing_is_asked_for_again_after_half_a_second() -> None:
    account = StepAccount()
    for now, wanted in ((0.0, 1), (0.4, None), (0.6, 1), (0.7, None)):
        assert not account.take(Head(1, 3), now)
        assert account.missing == wanted
        account.missing = None
    assert not account.take(Head(1, 2, HEARTBEAT), 1.2)
    assert account.missing == 1, "a heartbeat tells of the last step, too"


def test_acknowledgements_are_one_at_a_time_and_of_64_steps_or_at_the_tick() -> None:
    account = StepAccount()
    assert account.acknowledgement(0.0) is None
    for number in range(1, 65):
        assert not account.is_ack_due()
        assert account.take(Head(1, number), 0.0)
    assert account.is_ack_due()
    assert account.acknowledgement(0.0) == 64
    assert account.acknowledgement(0.4) is None
    assert account.acknowledgement(0.6) == 64
    account.acknowledged(None)
    assert account.acknowledgement(0.6) == 64
    account.acknowledged(64)
    account.acknowledged(3)
    assert account.acknowledgement(2.0) is None


@pytest.mark.parametrize("step", [None, 5, "text", [1, 2, 3]])
def test_what_has_no_head_is_malformed(step: Any) -> None:
    with pytest.raises(TritonMalformedEvent, match="no step"):
        read_head(step)
