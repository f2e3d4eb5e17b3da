"""Rounds of a drafted request: whatever the draft proposes, the text is the target's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

NAMES = ("cog_triton.backend.bls_engine", "cog_triton.backend.draft_rounds")
END = 9


@pytest.fixture(scope="module")
def rounds() -> Iterator[Any]:
    stand_in = ModuleType("triton_python_backend_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stand_in.__name__, stand_in)
        for name in NAMES:
            sys.modules.pop(name, None)
        try:
            yield importlib.import_module(NAMES[1])
        finally:
            for name in NAMES:
                sys.modules.pop(name, None)


class Model:
    """An engine's model: the next token is a function of the text so far."""

    def __init__(self, token: Callable[[list[int]], int], *, says_end: bool, echoes: bool) -> None:
        self.token, self.says_end, self.echoes = token, says_end, echoes
        self.calls: list[dict[str, Any]] = []

    def make(self, text: list[int], count: int, proposed: list[int]) -> list[int]:
        made: list[int] = []
        for place in range(count):
            token = self.token([*text, *made])
            if token == END:
                return [*made, END] if self.says_end else made
            made.append(token)
            if proposed and (place == len(proposed) or proposed[place] != token):
                break
        return made

    def call(self, request: Any) -> list[Any]:
        values = {name: tensor.ravel().tolist() for name, tensor in request.inputs.items()}
        self.calls.append(values)
        text, count = values["input_ids"], values["request_output_len"][0]
        assert len(text) == values["input_lengths"][0]
        made = self.make(text, count, values.get("draft_input_ids", []))
        return [SimpleNamespace(beams=[[*(text if self.echoes else []), *made]])]


def generate(
    rounds: Any, target: Model, draft: Model, count: int, longest: int = 1000, **inputs: Any
) -> tuple[list[int], Any]:
    engines = rounds.Engines(target, draft, 3, longest, excludes_input=not target.echoes)
    given = {
        "input_ids": np.array([[5, 6]], np.int32),
        "request_output_len": np.array([[count]], np.int32),
        "end_id": np.array([[END]], np.int32),
        "runtime_top_k": np.array([[1]], np.int32),
        **inputs,
    }
    generation = rounds.Generation(engines, given)
    return [token for found in generation.rounds() for token in found], generation


@given(
    text=st.lists(st.integers(1, END), min_size=40, max_size=40),
    guesses=st.lists(st.integers(1, END), min_size=40, max_size=40),
    count=st.integers(1, 36),
    says_end=st.booleans(),
    echoes=st.booleans(),
    longest=st.integers(8, 60),
)
def test_the_text_is_the_targets_own(
    text: list[int],
    guesses: list[int],
    count: int,
    says_end: bool,
    echoes: bool,
    longest: int,
    rounds: Any,
) -> None:
    target = Model(lambda ids: text[len(ids)], says_end=says_end, echoes=echoes)
    draft = Model(lambda ids: guesses[len(ids)], says_end=says_end, echoes=echoes)
    made, generation = generate(rounds, target, draft, count, longest)
    assert made == target.make([5, 6], count, [])
    assert generation.accepted <= generation.proposed
    for each in target.calls:
        room = longest if each.get("draft_input_ids") else max(longest, 2)
        assert len(each["input_ids"]) + len(each.get("draft_input_ids", [])) <= room


def test_a_draft_that_is_right_saves_calls(rounds: Any) -> None:
    target = Model(lambda ids: len(ids) % 7, says_end=False, echoes=False)
    draft = Model(target.token, says_end=False, echoes=False)
    made, generation = generate(rounds, target, draft, 16)
    assert len(made) == 16
    assert len(target.calls) == len(draft.calls) == 4
    assert (generation.accepted, generation.proposed) == (12, 12)


def test_stop_words_and_least_tokens_hold_over_rounds(rounds: Any) -> None:
    target = Model(lambda ids: len(ids) % 7, says_end=False, echoes=False)
    draft = Model(lambda ids: 8, says_end=False, echoes=False)
    words = np.array([[[3, 4, 6], [2, 3, -1]]], np.int32)
    made, _ = generate(rounds, target, draft, 16, stop_words_list=words)
    assert made == [2, 3, 4], "3, 4 came in two rounds"
    target.calls.clear()
    generate(rounds, target, draft, 4, min_tokens=np.array([[3]], np.int32))
    assert [each["min_tokens"][0] for each in target.calls] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("inputs", "drafted"),
    [
        ({"runtime_top_k": 1}, True),
        ({"temperature": 0.0}, True),
        ({"runtime_top_k": 1, "repetition_penalty": 1.0, "frequency_penalty": 0.0}, True),
        ({}, False),
        ({"runtime_top_k": 2}, False),
        ({"runtime_top_k": 1, "beam_width": 2}, False),
        ({"runtime_top_k": 1, "lora_task_id": 5}, False),
        ({"runtime_top_k": 1, "return_log_probs": True}, False),
        ({"runtime_top_k": 1, "repetition_penalty": 1.1}, False),
    ],
)
def test_only_greedy_requests_for_tokens_are_drafted(
    inputs: dict[str, Any], drafted: bool, rounds: Any
) -> None:
    tensors = {name: np.array([[value]]) for name, value in inputs.items()}
    assert rounds.is_drafted(tensors) is drafted
