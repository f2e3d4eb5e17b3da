"""Predictor of the mock: its inputs, and text buffered by tokens."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from cog._inspector import create_predictor
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import CogTritonError, InvalidArgument, InvalidArgumentMaxTokens
from cog_triton.serving.mock_predictor import MockPredictor, buffered
from cog_triton.serving.predictor import Predictor

OWN = {"tps", "n_output_tokens", "output_method", "buffer_size", "inject", "inject_after"}


def inputs(kind: type) -> dict[str, Any]:
    return dict(create_predictor(kind.__module__, kind.__name__).inputs)


def test_mock_takes_the_runners_inputs_and_its_own() -> None:
    mine, theirs = inputs(MockPredictor), inputs(Predictor)
    assert list(mine) == [*theirs, *(name for name in mine if name in OWN)]
    assert set(mine) - set(theirs) == OWN
    for name in theirs.keys() - {"prompt"}:
        assert mine[name] == theirs[name]


def test_runner_has_no_mock_inputs() -> None:
    assert OWN.isdisjoint(inspect.signature(Predictor.run).parameters)


class Telemetry:
    def __init__(self) -> None:
        self.refusals: list[CogTritonError] = []

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        self.refusals.append(error)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"output_method": "buffer"}, InvalidArgument, "buffer_size: missing"),
        ({"buffer_size": 3}, InvalidArgument, "buffer_size=3: only with output_method=buffer"),
        ({"inject_after": 3}, InvalidArgument, "inject_after=3: only with inject"),
        (
            {"n_output_tokens": 3, "max_tokens": 4},
            InvalidArgumentMaxTokens,
            "n_output_tokens (3) and max_tokens (4)",
        ),
        (
            {"n_output_tokens": 3, "min_new_tokens": 2},
            InvalidArgumentMaxTokens,
            "n_output_tokens (3) and min_new_tokens (2)",
        ),
    ],
)
def test_contradicting_inputs_are_rejected_and_observed(
    values: dict[str, Any], error: type[CogTritonError], text: str
) -> None:
    predictor = MockPredictor()
    predictor._telemetry = Telemetry()
    predictor._runtime = SimpleNamespace(sampling_defaults={})
    own = {name: field.default for name, field in inputs(MockPredictor).items() if name in OWN}
    with pytest.raises(error) as caught:  # Cog leaves out what the request does
        asyncio.run(predictor.run(**{**own, **values}))
    assert text in str(caught.value)
    assert predictor._telemetry.refusals == [caught.value]


class Source:
    """Chunks of text, each of some tokens."""

    def __init__(self, chunks: list[tuple[str, int]]) -> None:
        self._chunks = chunks
        self.count = 0
        self.closed = False

    def __iter__(self) -> Generator[str, None, None]:
        try:
            for text, tokens in self._chunks:
                self.count += tokens
                if text:
                    yield text
        finally:
            self.closed = True

    def pieces(self, size: float) -> Generator[str, None, None]:
        return buffered(iter(self), lambda: self.count, size)  # type: ignore[arg-type]


def test_buffered_chunks_have_the_requested_tokens() -> None:
    letters = [(letter, 1) for letter in "abcdefgh"]
    assert list(Source(letters).pieces(3)) == ["abc", "def", "gh"]
    assert list(Source(letters).pieces(8)) == ["abcdefgh"]
    assert list(Source(letters).pieces(math.inf)) == ["abcdefgh"]
    assert list(Source(letters).pieces(1)) == list("abcdefgh")
    assert list(Source([]).pieces(math.inf)) == []


def test_buffered_counts_tokens_without_text() -> None:
    assert list(Source([("ab", 2), ("cdefg", 5), ("h", 1)]).pieces(3)) == ["abcdefg", "h"]
    assert list(Source([("", 1), ("", 1), ("ü", 1), ("x", 1)]).pieces(2)) == ["ü", "x"]


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "bc"]), st.integers(1, 9)), max_size=30),
    st.integers(1, 20),
)
def test_buffered_keeps_all_text_and_the_minimum_size(
    chunks: list[tuple[str, int]], size: int
) -> None:
    found = list(Source(chunks).pieces(size))
    assert "".join(found) == "".join(text for text, _ in chunks)
    assert len(found) <= sum(tokens for _, tokens in chunks) // size + 1


def test_closing_buffered_closes_the_source() -> None:
    source = Source([("a", 1), ("b", 1)])
    stream = source.pieces(1)
    assert next(stream) == "a"
    stream.close()
    assert source.closed
