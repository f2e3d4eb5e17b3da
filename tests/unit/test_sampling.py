"""Sampling parameters: validation, with errors that name the value and the rule."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import InvalidArgument
from cog_triton.text.sampling import MAX_SEED, SamplingParams, resolve_seed

FLOATS = (
    "temperature",
    "top_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
)


def test_seeds_lose_their_sign_and_minus_one_is_a_random_one() -> None:
    assert [resolve_seed(seed) for seed in (0, 7.0, 2**64, -2)] == [0, 7, 2**64, 2**64 - 2]
    for nothing in (None, -1):
        assert len({resolve_seed(nothing) for _ in range(8)}) > 1


def test_min_tokens_may_be_all_tokens() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3


NUMBERS = {
    "min_tokens": st.integers(-2, 10**6),
    "top_k": st.integers(-2, 100),
    "seed": st.integers(-1, 2**65),
    **dict.fromkeys(FLOATS, st.floats()),
}


@given(st.fixed_dictionaries({"max_tokens": st.integers(-2, 10**6)}, optional=NUMBERS))
def test_either_a_valid_set_or_e1005_naming_one_of_the_values(values: dict[str, Any]) -> None:
    params, refusal = None, ""
    try:
        params = SamplingParams(**values)
    except InvalidArgument as error:
        refusal = error.detail
    if params is None:
        assert any(refusal.startswith(f"{name}={value}: ") for name, value in values.items())
        return
    assert 0 <= params.min_tokens <= params.max_tokens
    assert 0 <= params.top_p <= 1
    assert params.max_tokens >= 1
    assert params.top_k >= 0
    assert params.repetition_penalty > 0
    assert 0 <= (params.seed or 0) <= MAX_SEED
    assert params.temperature >= 0
    assert all(math.isfinite(value) for value in dataclasses.astuple(params) if value or value == 0)


@pytest.mark.parametrize(
    ("values", "greedy"),
    [
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"top_k": 1, "top_p": 0.9}, True),
        ({"top_k": 0, "top_p": 0.0}, True),
        ({"top_k": 0, "top_p": 0.9}, False),
        ({"top_k": 50, "top_p": 0.0}, False),
    ],
)
def test_greedy_is_temperature_0_or_top_k_1(values: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(max_tokens=1, **values).greedy is greedy
