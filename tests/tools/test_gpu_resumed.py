"""tests/gpu/resumed.py: which first differences are near ties, and what a stream has told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from script_modules import GPU, imported


@pytest.fixture(scope="module")
def resumed() -> Iterator[Any]:
    with imported(GPU, ("resumed",)) as modules:
        yield modules.resumed


def told(module: Any, tokens: str, likeliest: dict[str, float] | None = None, **more: Any) -> Any:
    """A stream of one letter a token, all with the same likeliest ones."""
    tops = [likeliest or {"a": -0.5, "b": -0.55}] * len(tokens)
    return module.Told(list(tokens), tops, tokens, more.pop("end", "length"), **more)


def stream_of(module: Any, data: bytes, status: int = 200) -> Any:
    answer = module.Reads(b'"text"')
    answer.begin(status, {})
    answer.body(data, 1.0)
    return module.Stream(answer)


def test_only_a_near_tie_is_no_fault(resumed: Any) -> None:
    greedy = {"temperature": 0}
    one = told(resumed, "aab")
    assert resumed.fault(greedy, one, told(resumed, "aab")) == ""
    assert resumed.fault(greedy, one, told(resumed, "abb")) == ""
    apart = {"a": -0.2, "b": -1.8}
    found = resumed.fault(greedy, told(resumed, "aa", apart), told(resumed, "ab", apart))
    assert found == "at 1: the two best are 1.600 apart"
    moved = resumed.fault(greedy, one, told(resumed, "abb", {"a": -0.9, "b": -0.5}))
    assert moved == "at 1: log probabilities differ by 0.400"
    drawn = {"temperature": 0.8, "seed": 1}
    assert resumed.fault(drawn, told(resumed, "aa", apart), told(resumed, "ab", apart)) == ""


def test_penalties_count_in_a_tie(resumed: Any) -> None:
    likeliest = {"a": -0.2, "b": -0.65}
    pair = told(resumed, "ab", likeliest), told(resumed, "aa", likeliest)
    asked = {"temperature": 0, "presence_penalty": 0.4}
    assert resumed.fault(asked, *pair) == ""  # -0.6 and -0.65
    assert "0.450 apart" in resumed.fault({"temperature": 0}, *pair)


def test_shares_are_told_by_the_length_at_the_cut(resumed: Any) -> None:
    one = [told(resumed, "a" * 50) for _ in range(3)]
    found = [
        told(resumed, "a" * 50, cut=5),
        told(resumed, "a" * 49 + "b", cut=40),
        told(resumed, "a" * 50, cut=50),  # it had ended
    ]
    rows = resumed.shares(one, found)
    assert rows == {"cut from 1 on": "1 of 1", "cut from 33 on": "0 of 1"}


def test_a_stream_is_read(resumed: Any) -> None:
    def event(text: str, finish: str | None = None) -> bytes:
        log_probs = {"tokens": [text], "top_logprobs": [{text: -0.1}]}
        choice = {"text": text, "logprobs": log_probs, "finish_reason": finish}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"

    stream = stream_of(resumed, event("x"))
    stream.before = len(stream.answer.text)
    assert not resumed.Told.of(stream).whole
    stream.answer.body(event("y", "stop"), 3.5)
    assert stream.answer.pause == 2.5
    found = resumed.Told.of(stream)
    assert (found.tokens, found.text, found.end, found.cut) == (["x", "y"], "xy", "stop", 1)
    assert found.likeliest == [{"x": -0.1}, {"y": -0.1}]
    stream.answer.body(b'data: {"error": {"code": "E2105", "message": "no"}}\n', 4.0)
    assert resumed.Told.of(stream).end == "E2105"
    assert resumed.is_json('{"a": 1}')
    assert not resumed.is_json('{"a": ')


def test_eight_classes_are_asked(resumed: Any) -> None:
    assert len(resumed.CLASSES) == 8
    body = resumed.Asked("JSON schema", 1).body(resumed.Prompt("a", []), 9)
    assert body["response_format"]["type"] == "json_schema"
    assert (body["max_tokens"], body["logprobs"], body["ignore_eos"]) == (9, 20, False)


def test_a_chat_is_read_as_completions_are(resumed: Any) -> None:
    top = [{"token": "x", "logprob": -0.1}, {"token": "y", "logprob": -2.5}]
    told_one = {"content": [{"token": "x", "logprob": -0.1, "top_logprobs": top}]}
    choice = {"delta": {"content": "x"}, "logprobs": told_one, "finish_reason": "length"}
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"
    found = resumed.Told.of(stream_of(resumed, event))
    assert found.whole
    assert (found.tokens, found.text) == (["x"], "x")
    assert found.likeliest == [{"x": -0.1, "y": -2.5}]


def test_a_refusal_is_no_broken_stream(resumed: Any) -> None:
    body = b'{"error": {"code": "E2105", "message": "the engine is being restarted"}}'
    assert resumed.Told.of(stream_of(resumed, body, 503)).end == resumed.REFUSED
    assert resumed.Told.of(stream_of(resumed, b"")).end == "cut"


def test_tokens_without_a_text_differ_by_their_bytes(resumed: Any) -> None:
    def one(number: int) -> dict[str, Any]:
        return {"token": "\ufffd", "bytes": [number], "logprob": -0.5}

    told_one = {"content": [{**one(200), "top_logprobs": [one(200), one(201)]}]}
    flat = resumed._flat(told_one)
    assert len(flat["top_logprobs"][0]) == 2
    assert flat["tokens"][0] in flat["top_logprobs"][0]
