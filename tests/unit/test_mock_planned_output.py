"""Output plan of the mock engine: length and end of a request's output."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_requests import PASSAGE, request

from cog_triton.engines.mock.scheduler import PlannedOutput, plan_output
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument

NONE: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_tokens": 99}, (99, "length")),
        ({"max_tokens": 100}, (len(PASSAGE), "stop")),
        ({"max_tokens": 100, "made": [1, 2]}, (len(PASSAGE) - 2, "stop")),
        ({"max_tokens": 100, "min_tokens": 40}, (40, "stop")),
        ({"max_tokens": 100, "end_id": -1}, (100, "length")),
    ],
)
def test_output_ends_at_max_tokens_or_with_the_passage_if_it_may_fill_the_context(
    values: dict[str, Any], expected: tuple[int, str]
) -> None:
    asked = request(**values)
    context = len(asked.input_ids) + 100
    found = plan_output(asked, PASSAGE, asked.end_ids(frozenset([1])), context)
    assert (found.steps, found.end) == expected
    assert found.steps == found.tokens


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, PlannedOutput(4, 3, "stop")),
        ({"max_tokens": 4}, PlannedOutput(4, 3, "stop")),
        ({"max_tokens": 3}, PlannedOutput(3, 3, "length")),
        ({"min_tokens": 3}, PlannedOutput(4, 3, "stop")),
        ({"min_tokens": 4}, PlannedOutput(11, 10, "stop")),
        ({"min_tokens": 50, "max_tokens": 60}, PlannedOutput(53, 52, "stop")),
    ],
)
def test_an_end_id_ends_the_output_after_min_tokens_and_is_cut(
    values: dict[str, Any], expected: PlannedOutput
) -> None:
    assert (
        plan_output(request(**{"max_tokens": 50, **values}), PASSAGE, frozenset([13])) == expected
    )


@pytest.mark.parametrize(
    ("words", "values", "expected"),
    [
        (((12, 13),), {}, PlannedOutput(4, 2, "stop")),
        (((16, 10),), {}, PlannedOutput(8, 6, "stop")),
        (((13, 12),), {}, PlannedOutput(50, 50, "length")),
        (((12, 13),), {"min_tokens": 4}, PlannedOutput(11, 9, "stop")),
        (((12, 13), (11, 12)), {}, PlannedOutput(3, 1, "stop")),
        (((10,),), {}, PlannedOutput(1, 0, "stop")),
    ],
)
def test_a_stop_word_ends_the_output_and_is_cut(
    words: tuple[tuple[int, ...], ...], values: dict[str, Any], expected: PlannedOutput
) -> None:
    assert plan_output(request(50, stop_words=words, **values), PASSAGE, NONE) == expected


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=3),
    st.integers(0, 40),
)
def test_one_pass_over_the_passage_finds_every_stop_word(
    passage: list[int], words: list[tuple[int, ...]], min_tokens: int
) -> None:
    found = plan_output(request(200, stop_words=tuple(words), min_tokens=min_tokens), passage, NONE)
    output = StopWords(words, min_tokens)
    stopped = any(output.add(passage[place % len(passage)], 0.0) for place in range(200))
    assert found.tokens == len(output.rest())
    assert found.end == ("stop" if stopped else "length")
    assert found.steps == output.count


@pytest.mark.parametrize("kind", ["error", "crash", "hang"])
def test_an_injection_happens_at_the_next_token(kind: Any) -> None:
    assert plan_output(request(5, inject=kind), PASSAGE, NONE) == PlannedOutput(1, 0, kind)
    assert plan_output(request(5, inject=kind, inject_after=4), PASSAGE, NONE) == PlannedOutput(
        5, 4, kind
    )


def test_an_injection_after_the_end_of_the_output_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"inject_after=5: must be less than 5, "):
        plan_output(request(5, inject="error", inject_after=5), PASSAGE, NONE)
    with pytest.raises(InvalidArgument, match=r"inject_after=9: must be less than 4, "):
        plan_output(request(50, inject="crash", inject_after=9), PASSAGE, frozenset([13]))
