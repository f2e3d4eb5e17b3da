"""Bounds of text: beyond each there is a code, and up to it all is taken (docs/security.md)."""

from __future__ import annotations

import base64
import json
import logging
import re
from dataclasses import replace

import pytest
from text_cases import Work, call, data_url, parse_chat, render, tools

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import CogTritonError, InvalidArgument, nearest
from cog_triton.serving.generation import GenerationRequest
from cog_triton.serving.openai.sequences import MAX_LOG_PROBS, bound_log_probs
from cog_triton.system import log_notes
from cog_triton.system.log_notes import MAX_NOTES, note_unknown
from cog_triton.text import chat, client_json, stop_strings
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.stop_strings import StopMatcher, WordLimits

BEYOND: dict[str, tuple[str, str, Work]] = {
    "fields of a template": (
        "E1003",
        "more than 16 fields",
        lambda: render("{prompt}" * 17, "x"),
    ),
    "pieces of a template": (
        "E1003",
        "16384 pieces",
        lambda: render("{prompt}" + "{{" * 20_000, "x"),
    ),
    "text of a template": (
        "E1002",
        "makes 32000000 characters of text; 9049088 at most",
        lambda: render("{prompt}" * 16, "x" * 2_000_000),
    ),
    "tools": ("E1005", "at most 1024 items", lambda: parse_chat(tools=tools(1025))),
    "values of arguments": (
        "E1005",
        "values; 262144 at most",
        lambda: chat.parse_messages(call('{"a":[' + "0," * 262_144 + "0]}")),
    ),
    "a schema's number": (
        "E1005",
        "a number has 4000 characters",
        lambda: Guide("json_schema", '{"const":' + "9" * 4000 + "}").check("w"),
    ),
    "stop strings with commas": (
        "E1005",
        "has 70000 characters; 65600 at most",
        lambda: WordLimits(64, 1024).parse("stop_sequences", "," * 70_000),
    ),
    "log probabilities": (
        "E1005",
        f"{MAX_LOG_PROBS} at most",
        lambda: bound_log_probs([planned((1 << 16) + 1, 1)], 64, 0, limited=True),
    ),
}


def planned(max_tokens: int, prompt: int, *, of_prompt: bool = False) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(
        engine=EngineRequest(input_ids=[1] * prompt, sampling=sampling, prompt_log_probs=of_prompt)
    )


@pytest.mark.parametrize("name", list(BEYOND))
def test_beyond_a_bound_there_is_a_code(name: str) -> None:
    code, rule, work = BEYOND[name]
    with pytest.raises(CogTritonError, match=re.escape(rule)) as caught:
        work()
    assert caught.value.code == code


def test_up_to_a_bound_all_is_taken() -> None:
    render("{prompt}" * 16, "x" * 1000)
    parse_chat(tools=tools(1024))
    chat.parse_messages(call('{"a":[' + "0," * 262_000 + "0]}"))
    chat.parse_messages(call('{"a":' + "[" * 63 + "]" * 63 + "}"))
    for prompts, made, top in (
        ([planned(1 << 17, 1000)], 1, 20),
        ([planned(1, 4096, of_prompt=True)] * 64, 1, 1),
    ):
        assert bound_log_probs(prompts, made, top, limited=True) is prompts
    with pytest.raises(InvalidArgument, match="logprobs"):
        bound_log_probs([planned(1, 1 << 17, of_prompt=True)], 64, 0, limited=False)


def test_max_tokens_that_nobody_gave_is_lowered_to_what_fits() -> None:
    long, short = planned(131_072, 1), planned(50, 1)
    bounded = bound_log_probs([long, short], 2, 20, limited=False)
    assert [each.engine.sampling.max_tokens for each in bounded] == [49_932, 50]
    assert bounded[1] is short
    (note,) = bounded[0].notes
    assert note.startswith("max_tokens 131072 was lowered to 49932: 5507124 log probabilities")
    assert bound_log_probs(bounded, 2, 20, limited=True) is bounded
    sampling = replace(long.engine.sampling, min_tokens=100_000)
    at_least = replace(long, engine=replace(long.engine, sampling=sampling))
    with pytest.raises(InvalidArgument, match="logprobs"):
        bound_log_probs([at_least], 2, 20, limited=False)


def test_unknown_names_are_noted_until_there_are_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_notes, "_noted", set())
    note_unknown(logging.getLogger("x"), "field", [f"{n}{'x' * 200}" for n in range(2000)])
    assert len(caplog.messages) == MAX_NOTES
    assert caplog.messages[0] == f"field '0{'x' * 95}' is unknown, and ignored"


def test_long_words_are_near_nothing() -> None:
    assert nearest("mesages", ["messages"]) == "; did you mean 'messages'?"
    assert nearest("m" * 97, ["m" * 96]) == ""
    assert nearest("m" * 95, ["m" * 97]) == ""


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", "[1,]", '"\x01"', "1e999", "٣", ""])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        client_json.parse(text)


def test_json_of_a_client_has_its_values() -> None:
    value = {"a": [1, -2.5e3, True, None, "1e999 ,[{" * 40], "b": {}}
    assert client_json.parse(json.dumps(value)) == value
    assert client_json.parse(json.dumps(",[{" * 100)) == ",[{" * 100


def test_sequences_share_the_tables_of_their_stop_strings() -> None:
    stop_strings._fallback.cache_clear()
    for _ in range(64):
        StopMatcher([f"{'a' * 1000}{number}" for number in range(64)])
    assert stop_strings._fallback.cache_info().misses == 64


def test_a_data_url_has_few_escapes() -> None:
    with pytest.raises(InvalidArgument, match="more than 65536 escapes"):
        data_url("image/png;base64," + "%41" * 65_537)
    assert data_url("image/png;base64,%2b%2B%2f%3D") == base64.b64decode(b"++/=")
