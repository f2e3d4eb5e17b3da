"""Guided answers, biases and stop tokens of the OpenAI API, in OpenAI's spelling and vLLM's."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from openai_server import THREE, TOKENIZER, USER, api
from scripted_triton import event

from cog_triton.engines.base import Abilities
from cog_triton.engines.openvino import guides
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import ABILITIES


def check(guide: Guide, where: str) -> None:
    """As OpenVINO, but for grammars."""
    (guide.check if guide.kind == "grammar" else partial(guides.check, guide))(where)


ALL = Abilities(
    guides={"json_schema", "regex", "grammar"}, sampling=frozenset(ABILITIES), check_guide=check
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = 'root ::= "a"'
GUIDES: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type":"object"}')),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ("json_schema", json.dumps(SCHEMA)),
    ),
    ({"guided_json": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
    ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", json.dumps(SCHEMA))),
    ({"guided_regex": "[ab]+"}, ("regex", "[ab]+")),
    ({"guided_choice": ["yes", "no."]}, ("regex", r"yes|no\.")),
    ({"guided_grammar": GRAMMAR}, ("ebnf_grammar", GRAMMAR)),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "a"}}, ("regex", "a")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ("regex", "a|b")),
    ({"structured_outputs": {"grammar": GRAMMAR}}, ("ebnf_grammar", GRAMMAR)),
    ({"structured_outputs": {"json_object": True}}, ("json_schema", '{"type":"object"}')),
    ({"structured_outputs": {"json": {}}}, ("json_schema", "{}")),
    ({"guided_json": {}, "guided_json_object": False}, ("json_schema", "{}")),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_guides_reach_the_engine(path: str) -> None:
    prompt = {"messages": USER} if path == "chat/completions" else {"prompt": "a"}
    with api(THREE, abilities=ALL) as served:
        for fields, expected in GUIDES:
            answer = served.post(f"/v1/{path}", {"model": "small", **prompt, **fields})
            assert answer.status_code == 200, answer.text
            sent = served.triton.requests[-1].values
            kind = sent["guided_decoding_guide_type"], sent["guided_decoding_guide"]
            assert kind == expected
        served.post(f"/v1/{path}", {"model": "small", **prompt, "guided_json": None})
        assert "guided_decoding_guide" not in served.triton.requests[-1].values


@pytest.mark.parametrize(
    ("abilities", "fields", "words"),
    [
        (Abilities(), {"guided_regex": "a"}, "guided_regex: not supported: this engine has no"),
        (
            Abilities(),
            {"response_format": {"type": "json_object"}},
            "response_format: only type 'text' is supported: this engine has no guided decoding",
        ),
        (
            ALL,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema.not: not supported",
        ),
        (
            Abilities(guides={"json_schema"}),
            {"structured_outputs": {"grammar": GRAMMAR}},
            "structured_outputs.grammar: not supported: this engine is guided by json_schema alone",
        ),
        (ALL, {"guided_regex": "(a"}, "guided_regex: a '('"),
        (ALL, {"guided_regex": ""}, "guided_regex: "),
        (ALL, {"guided_choice": []}, "guided_choice: must be texts"),
        (ALL, {"guided_grammar": ""}, "guided_grammar: is empty"),
        (ALL, {"structured_outputs": {}}, "structured_outputs: has no guide"),
        (ALL, {"guided_json": {"pattern": "a"}}, "guided_json.pattern: not supported"),
        (ALL, {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice: not together with"),
        (
            ALL,
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex: not together with response_format",
        ),
        (ALL, {"structured_outputs": {"regx": "a"}}, "structured_outputs.regx: unknown field"),
        (ALL, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural"),
        (ALL, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern=' '"),
        (ALL, {"min_p": 1.5}, "min_p=1.5"),
        (Abilities(), {"min_p": 0.5}, "min_p: this engine does not support it"),
        (Abilities(), {"logit_bias": {"1": 5}}, "logit_bias: this engine does not support it"),
        (Abilities(), {"allowed_token_ids": [1]}, "allowed_token_ids: this engine does not"),
        (ALL, {"allowed_token_ids": [1, 5000]}, "allowed_token_ids: holds 5000"),
        (ALL, {"logit_bias": {"x": 5}}, "logit_bias: 'x' is not a token id"),
        (ALL, {"logit_bias": {"1": 101}}, "logit_bias.1=101: must be from -100 to 100"),
        (ALL, {"logit_bias": {"5000": 1}}, "logit_bias: holds 5000"),
        (ALL, {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias="),
        (ALL, {"stop_token_ids": [5000]}, "stop_token_ids: holds 5000"),
        (ALL, {"stop_token_ids": [1] * 65}, "stop_token_ids: has 65; 64 at most"),
        (ALL, {"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    abilities: Abilities, fields: dict[str, Any], words: str
) -> None:
    with api(THREE, abilities=abilities) as served:
        answer = served.post("/v1/completions", {"model": "small", "prompt": "a", **fields})
        assert served.triton.requests == []
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in fields


def test_tools_are_guided_by_json_alone() -> None:
    body = {
        "model": "small",
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "guided_regex": "a",
    }
    with api(THREE, abilities=ALL) as served:
        answer = served.post("/v1/chat/completions", body)
    assert "guided_regex: not together with tools" in answer.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("at_least", "expected"), [(0, "a"), (3, "abc")])
def test_stop_tokens_end_the_text_before_them(streamed: bool, at_least: int, expected: str) -> None:
    ids = TOKENIZER.encode("abcbd")
    values = [-float(place) for place in range(len(ids))]
    parts = [event(output_ids=ids, output_log_probs=values)]
    body = {"model": "small", "prompt": "x", "logprobs": 0, "min_tokens": at_least}
    body |= {"stop_token_ids": [ids[1]], "stream": streamed}
    with api(parts) as served:
        answer = served.post("/v1/completions", body)
    if streamed:
        lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
        pieces = [json.loads(line[6:])["choices"][0] for line in lines]
    else:
        pieces = answer.json()["choices"]
    assert "".join(piece["text"] for piece in pieces) == expected
    assert pieces[-1]["finish_reason"] == "stop"
    told = [
        value
        for piece in pieces
        for value in (piece["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    assert told == values[: len(expected)]
