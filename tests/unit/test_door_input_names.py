"""Unknown inputs of predictions, which coglet would drop: refused, or noted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cog_triton.door.cog_gate import unknown_inputs
from cog_triton.errors import InvalidArgument

KNOWN = frozenset({"prompt", "max_tokens", "stop_sequences", "seed", "messages", "system_prompt"})


def names(inputs: Any, known: frozenset[str] = KNOWN) -> list[str]:
    return unknown_inputs(json.dumps({"input": inputs}).encode(), known)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools: not an input of predictions; /v1/chat"),
        ({"image": "data:image/png;base64,AA=="}, "image: not an input of predictions; /v1/chat"),
        ({"images": ["a"]}, "images: not an input"),
        ({"stop": ["a"]}, "stop: not an input of predictions; use stop_sequences"),
        ({"logit_bias": {"1": 2}}, "logit_bias: not an input"),
        ({"promt": "a"}, "promt: unknown input; did you mean 'prompt'?"),
        ({"message": []}, "message: unknown input; did you mean 'messages'?"),
        ({"max_token": 1}, "did you mean 'max_tokens'?"),
        ({"prompt": "a", "m" * 10_000: 1, "sed": 2}, "sed: unknown input; did you mean 'seed'?"),
    ],
)
def test_what_would_change_the_text_is_refused(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        names(inputs)
    assert words in caught.value.detail
    assert len(caught.value.detail) < 300


def test_other_unknown_inputs_are_named_for_the_log() -> None:
    assert names({"prompt": "a", "seed": 1}) == []
    assert names({"prompt": "a", "debug": True, "x" * 200: 1}) == ["debug", "x" * 80]
    assert names({"tools": [], "images": None, "stop": "", "n": False}) == []
    assert len(names({f"{place}{'q' * 30}": 1 for place in range(9999)})) == 20


def test_a_builder_has_inputs_of_its_own() -> None:
    assert names({"config": "a", "images": 1}, frozenset({"config"})) == ["images"]


@pytest.mark.parametrize(
    "body", [b"", b"nothing", b"[]", b"{}", b'{"input": []}', b'{"input": null}', b"[" * 9999]
)
def test_other_bodies_are_left_to_coglet(body: bytes) -> None:
    assert unknown_inputs(body, KNOWN) == []
