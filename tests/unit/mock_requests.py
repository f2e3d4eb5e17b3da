"""Requests to the mock, and a small model of it."""

from __future__ import annotations

from typing import Any

from cog_triton.engines.mock.mock_directory import MockModel
from cog_triton.engines.mock.mock_request import MockRequest
from cog_triton.text.sampling import SamplingParams

PASSAGE = [10, 11, 12, 13, 14, 15, 16]
MODEL = MockModel(output_ids=PASSAGE, eos_ids=[1], vocab_size=100, max_seq_len=10_000)
_SAMPLING = ("min_tokens", "seed", "temperature")


def request(max_tokens: int = 5, prompt: int = 3, **values: Any) -> MockRequest:
    sampling = {name: values.pop(name) for name in _SAMPLING if name in values}
    return MockRequest(
        input_ids=[2] * prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        **values,
    )


def expected_tokens(count: int) -> list[int]:
    """The first tokens of the mock engine's output."""
    return [PASSAGE[place % len(PASSAGE)] for place in range(count)]
