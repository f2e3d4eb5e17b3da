from typing import Any

import pytest

from cog_triton.engines import step_items
from cog_triton.engines.request import TokenEvent
from cog_triton.engines.step_items import StepItem, decode, encode, merge
from cog_triton.errors import InvalidArgument, TritonMalformedEvent

PLAIN = StepItem(7, 0, 3, [5, 6], [])
LAST = StepItem(2**62, 0, 0, [], [], step_items.LENGTH)
SAMPLED = StepItem(8, 1, 0, [5, 6], [-0.5, -0.25], step_items.STOP, None, 1)
ALTERNATIVES = StepItem(
    9, 0, 0, [1, 2], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], 0, None, 3, [3, 4, 5, 6]
)
FAILED = StepItem(10, 0, 4, [1], [], step_items.ERROR, "E2105 TritonUnavailable: gone")
FAILED_LATER = StepItem(11, 0, 4, [1], [-1.0], step_items.ERROR, "E1005 other", 1)
ALL = [PLAIN, LAST, SAMPLED, FAILED, ALTERNATIVES, FAILED_LATER]


def test_items_survive_encoding() -> None:
    step = encode(ALL)
    assert decode(step.items.tolist(), step.log_probs.tolist(), step.errors) == ALL
    assert decode(step.items, step.log_probs, step.errors) == ALL
    assert decode([]) == []


def test_the_layout_is_the_written_one() -> None:
    step = encode([PLAIN, ALTERNATIVES, FAILED])
    plain = [7, 0, 3, 0, 2, 0, 5, 6]
    alternatives = [9, 0, 0, 0, 2, 3, 1, 2, 3, 4, 5, 6]
    assert step.items.tolist() == [*plain, *alternatives, 10, 0, 4, 4, 1, 0, 1]
    assert (step.items.itemsize, step.log_probs.itemsize) == (8, 4)
    assert step.log_probs.tolist() == ALTERNATIVES.log_probs
    assert step.errors == [FAILED.error]


@pytest.mark.parametrize(
    ("ints", "floats", "errors"),
    [
        ([1], [], []),
        ([1, 0, 0, 0, 2, 0, 5], [], []),
        ([1, 0, 0, 0, -1, 0, 5], [], []),
        ([1, 0, 0, 5, 0, 0], [], []),
        ([1, 0, 0, -1, 0, 0], [], []),
        ([1, 0, 0, 0, 1, -1, 5], [], []),
        ([1, 0, 0, 0, 1, 1, 5], [], []),
        ([1, 0, 0, 0, 1, 3, 5, 6], [0.0, 0.0, 0.0], []),
        ([1, 0, 0, 4, 0, 0], [], []),
        ([1, 0, 0, 0, 0, 0], [1.0], []),
        ([1, 0, 0, 0, 0, 0], [], ["E2105 nobody's"]),
        ([1, 0, 0, 0, None, 0], [], []),
        ([1, 0, 0, 0, "2", 0, 5, 6], [], []),
        ([1, 0, 0, None, 0, 0], [], []),
    ],
)
def test_malformed_steps_are_refused(ints: Any, floats: Any, errors: Any) -> None:
    good = encode([PLAIN]).items.tolist()
    with pytest.raises(TritonMalformedEvent, match="E2104 TritonMalformedEvent: a step"):
        decode([*good, *ints], floats, errors)


def test_a_refusal_shows_what_is_malformed() -> None:
    good = encode([PLAIN]).items.tolist()
    with pytest.raises(TritonMalformedEvent) as caught:
        decode([*good, 1, 0, 0, 0, 900, 0, *range(1000, 1500)])
    assert "malformed at 8: [1, 0, 0, 0, 900, 0, 1000," in str(caught.value)
    assert len(str(caught.value)) < 300


def test_merging_joins_what_follows() -> None:
    items = [
        StepItem(1, 0, 0, [1], []),
        StepItem(2, 0, 5, [9], [-1.0, -1.5], 0, None, 2, [8]),
        StepItem(1, 0, 1, [2, 3], []),
        StepItem(2, 0, 6, [7], [-2.0, -2.5], 0, None, 2, [6]),
        StepItem(1, 1, 3, [4], []),
        StepItem(1, 0, 3, [], [], step_items.ERROR, "E2105 gone"),
        StepItem(2, 0, 7, [], [], step_items.STOP),
    ]
    assert merge(items) == [
        StepItem(1, 0, 0, [1, 2, 3], [], step_items.ERROR, "E2105 gone"),
        StepItem(2, 0, 5, [9, 7], [-1.0, -1.5, -2.0, -2.5], step_items.STOP, None, 2, [8, 6]),
        StepItem(1, 1, 3, [4], []),
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (StepItem(1, 0, 0, [1], []), StepItem(1, 0, 2, [3], [])),
        (StepItem(1, 0, 0, [1], []), StepItem(1, 0, 0, [3], [])),
        (StepItem(1, 0, 0, [1], []), StepItem(1, 0, 1, [3], [-1.0], 0, None, 1)),
        (StepItem(1, 0, 0, [1], [], step_items.STOP), StepItem(1, 0, 1, [3], [])),
    ],
)
def test_merging_hides_no_gap_or_end_and_mixes_no_widths(first: StepItem, second: StepItem) -> None:
    assert merge([first, second]) == [first, second]


def test_events_become_items() -> None:
    step = step_items.StepBuffer()
    step.add(1, 4, TokenEvent([5], [-0.5]))
    step.add(2, 7, TokenEvent([6], [-0.5], "length"), 1)
    step.add(3, 0, TokenEvent([], [], error=InvalidArgument("x=1: must be 2")))
    step.add(1, 5, TokenEvent([8], [0.0], "cancelled"))
    coded = "E1005 InvalidArgument: x=1: must be 2"
    length = StepItem(2, 0, 7, [6], [-0.5], step_items.LENGTH, None, 1)
    failed = StepItem(3, 0, 0, [], [], step_items.ERROR, coded)
    assert decode(*step.encoded()) == [
        StepItem(1, 0, 4, [5], []),
        length,
        failed,
        StepItem(1, 0, 5, [8], [], step_items.CANCELLED),
    ]
    step.merge()
    assert decode(*step.encoded()) == [
        StepItem(1, 0, 4, [5, 8], [], step_items.CANCELLED),
        length,
        failed,
    ]
