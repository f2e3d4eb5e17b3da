"""Inputs of a prediction: what is clamped or has no effect is told."""

from __future__ import annotations

from typing import Any

import pytest

from cog_triton.serving.prediction_inputs import PredictionInputs

PLAIN: dict[str, Any] = {
    "prompt": "Hi",
    "max_tokens": 512,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 0,
    "length_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "log_performance_metrics": False,
}
ABSENT = ("system_prompt", "min_tokens", "stop_sequences", "seed", "prompt_template")
OLD = ("max_new_tokens", "min_new_tokens", "messages")


def inputs(**values: Any) -> PredictionInputs:
    return PredictionInputs(**{**dict.fromkeys((*ABSENT, *OLD)), **PLAIN, **values})


def test_plain_inputs_need_no_note() -> None:
    assert inputs().notes() == []
    assert inputs(min_tokens=512).notes() == []


@pytest.mark.parametrize("names", [("min_tokens", "max_tokens"), ("min_new_tokens",) * 2])
def test_min_tokens_above_max_tokens_are_clamped_with_a_note(names: tuple[str, str]) -> None:
    found = inputs(**{names[0]: 600})
    assert (found.sampling().min_tokens, found.sampling().max_tokens) == (512, 512)
    assert found.notes() == ["min_tokens 600 was clamped to max_tokens"]


def test_a_length_penalty_is_taken_with_a_note() -> None:
    assert inputs(length_penalty=1.5).notes() == [
        "length_penalty has no effect: there is no beam search"
    ]


def test_a_negative_seed_is_taken() -> None:
    assert inputs(seed=-5).sampling().seed == 2**64 - 5
    assert len({inputs(seed=-1).sampling().seed for _ in range(8)}) > 1
