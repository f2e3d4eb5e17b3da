"""Inputs of a prediction: notes of those without effect, and contradictions of the mock's."""

from __future__ import annotations

from typing import Any

import pytest

from cog_triton.errors import CogTritonError, InvalidArgument, InvalidArgumentMaxTokens
from cog_triton.serving.mock_inputs import MockInputs
from cog_triton.serving.prediction_inputs import PredictionInputs as Inputs


def test_what_has_no_effect_is_noted() -> None:
    assert Inputs().notes() == Inputs(min_tokens=512).notes() == []
    (note,) = Inputs(length_penalty=1.5).notes()
    assert note == "length_penalty has no effect: there is no beam search"
    for values in ({"min_tokens": 600}, {"min_new_tokens": 600}):
        found = Inputs(**values)
        assert (found.sampling().min_tokens, found.sampling().max_tokens) == (512, 512)
        assert found.notes() == ["min_tokens 600 was clamped to max_tokens"]


def test_a_negative_seed_is_taken() -> None:
    assert Inputs(seed=-5).sampling().seed == 2**64 - 5
    assert len({Inputs(seed=-1).sampling().seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"output_method": "buffer"}, InvalidArgument, "buffer_size: missing"),
        ({"buffer_size": 3}, InvalidArgument, "buffer_size=3: only with output_method=buffer"),
        ({"inject_after": 3}, InvalidArgument, "inject_after=3: only with inject"),
        ({"n_output_tokens": 3, "max_tokens": 4}, InvalidArgumentMaxTokens, "(3) and max_tokens"),
        ({"n_output_tokens": 3, "min_new_tokens": 2}, InvalidArgumentMaxTokens, "min_new_tokens"),
    ],
)
def test_contradicting_inputs_of_the_mock_are_refused(
    values: dict[str, Any], error: type[CogTritonError], text: str
) -> None:
    with pytest.raises(error) as caught:
        MockInputs(**values).checked()
    assert text in str(caught.value)
