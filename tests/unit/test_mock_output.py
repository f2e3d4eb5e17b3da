"""Output plan of the mock engine: length and end of a request's output, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_requests import MODEL, PASSAGE, request

from cog_triton.engines.mock.engine import plan_output
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument, PromptTooLong
from cog_triton.text.guide import Guide

FULL = 10_000 - 3
WORDS = ((12, 13),)
CRASH = {"inject": "crash"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_tokens": 99}, (99, 99, "length")),
        # What may fill the context ends with the passage.
        ({"max_tokens": FULL}, (7, 7, "stop")),
        ({"max_tokens": FULL, "made": [1, 2]}, (5, 5, "stop")),
        ({"max_tokens": FULL, "min_tokens": 40}, (40, 40, "stop")),
        ({"max_tokens": FULL, "end_id": -1}, (FULL, FULL, "length")),
        # An end id ends the output after min_tokens, and is cut.
        ({"end_id": 13}, (4, 3, "stop")),
        ({"end_id": 13, "max_tokens": 4}, (4, 3, "stop")),
        ({"end_id": 13, "max_tokens": 3}, (3, 3, "length")),
        ({"end_id": 13, "min_tokens": 3}, (4, 3, "stop")),
        ({"end_id": 13, "min_tokens": 4}, (11, 10, "stop")),
        # So does a stop word, across the passage's end, too.
        ({"stop_words": WORDS}, (4, 2, "stop")),
        ({"stop_words": ((16, 10),)}, (8, 6, "stop")),
        ({"stop_words": ((13, 12),)}, (50, 50, "length")),
        ({"stop_words": WORDS, "min_tokens": 4}, (11, 9, "stop")),
        ({"stop_words": (*WORDS, (11, 12))}, (3, 1, "stop")),
        # A fault happens at the next token; those made before a resumption count.
        (CRASH, (1, 0, "crash")),
        ({**CRASH, "inject_after": 4}, (5, 4, "crash")),
        ({**CRASH, "inject_after": 4, "made": [1, 2]}, (3, 2, "crash")),
        ({**CRASH, "inject_after": 1, "made": [1, 2]}, (48, 48, "length")),
    ],
)
def test_output_is_planned(values: dict[str, Any], expected: tuple[int, int, str]) -> None:
    found = plan_output(MODEL, request(**{"max_tokens": 50, **values}))
    assert (found.steps, found.tokens, found.end) == expected


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=3),
    st.integers(0, 40),
)
def test_one_pass_over_the_passage_finds_every_stop_word(
    passage: list[int], words: list[tuple[int, ...]], min_tokens: int
) -> None:
    model = replace(MODEL, output_ids=passage)
    asked = request(200, stop_words=tuple(words), min_tokens=min_tokens, end_id=-1)
    found = plan_output(model, asked)
    output = StopWords(words, min_tokens)
    stopped = any(output.add(passage[place % len(passage)], 0.0) for place in range(200))
    assert found.steps == output.count
    assert found.tokens == len(output.rest())
    assert found.end == ("stop" if stopped else "length")


def test_only_allowed_tokens_are_made() -> None:
    plain = request()
    for allowed, passage in (((13, 11), [11, 13]), ((5,), [5])):
        sampling = replace(plain.sampling, allowed_token_ids=allowed)
        assert plan_output(MODEL, replace(plain, sampling=sampling)).passage == passage


def test_the_text_begins_after_the_tokens_made_and_skipped() -> None:
    found = plan_output(MODEL, request(made=[10, 11]), 2)
    assert found.ids(0, 8) == [*PASSAGE[4:], *PASSAGE[:4], 14]


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"prompt": 0}, InvalidArgument, "input_ids: empty"),
        ({"max_tokens": 9998}, PromptTooLong, "exceed maximum sequence length (10000)"),
        ({"bad_words": ((1,),)}, InvalidArgument, "bad_words_list: this engine"),
        ({"guide": Guide("json_schema", "{}")}, InvalidArgument, "guided_decoding_guide: this"),
        ({"made": [-1]}, InvalidArgument, "input_ids: holds -1; must be from 0 to 99"),
        ({"made": [100]}, InvalidArgument, "input_ids: holds 100; must be from 0 to 99"),
        ({**CRASH, "inject_after": 5}, InvalidArgument, "inject_after=5: must be less than 5, "),
        ({**CRASH, "inject_after": 9, "end_id": 13}, InvalidArgument, "must be less than 4, "),
    ],
)
def test_unservable_requests_are_refused(
    values: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        plan_output(MODEL, request(**values))
    assert text in str(caught.value)
