"""The mock's output is known from the start: how long it is, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_requests import PASSAGE, request, said

from cog_triton.engines.mock.planned_output import Output, plan
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument

NONE: frozenset[int] = frozenset()


def test_it_goes_on_to_max_tokens() -> None:
    assert plan(request(100), PASSAGE, frozenset([1])) == Output(100, 100, "length")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Output(4, 3, "stop")),
        ({"max_tokens": 4}, Output(4, 3, "stop")),
        ({"max_tokens": 3}, Output(3, 3, "length")),
        ({"min_tokens": 3}, Output(4, 3, "stop")),
        ({"min_tokens": 4}, Output(11, 10, "stop")),
        ({"min_tokens": 50, "max_tokens": 60}, Output(53, 52, "stop")),
    ],
)
def test_an_end_id_ends_it_after_min_tokens_and_is_no_output(
    values: dict[str, Any], expected: Output
) -> None:
    assert plan(request(**{"max_tokens": 50, **values}), PASSAGE, frozenset([13])) == expected


@pytest.mark.parametrize(
    ("words", "values", "expected"),
    [
        (((12, 13),), {}, Output(4, 2, "stop")),
        (((16, 10),), {}, Output(8, 6, "stop")),
        (((13, 12),), {}, Output(50, 50, "length")),
        (((12, 13),), {"min_tokens": 4}, Output(11, 9, "stop")),
        (((12, 13), (11, 12)), {}, Output(3, 1, "stop")),
        (((10,),), {}, Output(1, 0, "stop")),
    ],
)
def test_a_stop_word_is_cut_off(
    words: tuple[tuple[int, ...], ...], values: dict[str, Any], expected: Output
) -> None:
    assert plan(request(50, stop_words=words, **values), PASSAGE, NONE) == expected


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=3),
    st.integers(0, 40),
)
def test_looking_once_through_the_passage_is_enough(
    passage: list[int], words: list[tuple[int, ...]], min_tokens: int
) -> None:
    found = plan(request(200, stop_words=tuple(words), min_tokens=min_tokens), passage, NONE)
    output = StopWords(words, min_tokens)
    stopped = any(output.add(passage[place % len(passage)], 0.0) for place in range(200))
    assert found.tokens == len(output.rest())
    assert found.end == ("stop" if stopped else "length")
    assert found.steps == output.count


@pytest.mark.parametrize("kind", ["error", "crash", "hang"])
def test_what_is_injected_comes_with_the_next_token(kind: Any) -> None:
    assert plan(request(5, inject=kind), PASSAGE, NONE) == Output(1, 0, kind)
    assert plan(request(5, inject=kind, inject_after=4), PASSAGE, NONE) == Output(5, 4, kind)


def test_what_would_never_happen_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"inject_after=5: must be less than 5, "):
        plan(request(5, inject="error", inject_after=5), PASSAGE, NONE)
    with pytest.raises(InvalidArgument, match=r"inject_after=9: must be less than 4, "):
        plan(request(50, inject="crash", inject_after=9), PASSAGE, frozenset([13]))


def test_the_helper_says_it_again_and_again() -> None:
    assert said(9) == [*PASSAGE, *PASSAGE[:2]]
