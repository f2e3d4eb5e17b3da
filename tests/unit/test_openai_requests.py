"""OpenAI API request bodies, chats' and responses': accepted fields, and what becomes of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML_TOOLS
from hypothesis import given
from hypothesis import strategies as st
from known_fields import KNOWN_FIELDS
from openai import types
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params
from openai_server import THREE, TOKENIZER, USER, api, tokens

from cog_triton.errors import UserError
from cog_triton.serving.openai import requests
from cog_triton.serving.openai.requests import ChatRequest, CompletionRequest, parse
from cog_triton.text.sampling import MAX_TOKENS

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def test_defaults_are_openais() -> None:
    request = parse(ChatRequest, CHAT)
    sampling = request.sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_tokens == MAX_TOKENS
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.0, 0.0)
    assert sampling.repetition_penalty == 1.0
    assert not sampling.greedy
    assert request.stops() is None
    assert not request.log_probs
    assert len({parse(ChatRequest, CHAT).sampling().seed for _ in range(8)}) > 1


def test_given_fields_are_used() -> None:
    given = {"min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 0}
    given |= {"presence_penalty": -1, "frequency_penalty": 1.5, "repetition_penalty": 1.1}
    others = {"max_completion_tokens": 7, "stop": ["a", "b"], "logprobs": True, "top_logprobs": 0}
    request = parse(ChatRequest, {**CHAT, **given, **others})
    sampling = request.sampling()
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.max_tokens == 7
    assert sampling.greedy
    assert request.stops() == ["a", "b"]
    assert request.log_probs
    assert parse(ChatRequest, {**CHAT, "stop": "x"}).stops() == ["x"]
    assert parse(ChatRequest, {**CHAT, "stop": []}).stops() == []
    assert parse(ChatRequest, {**CHAT, "top_k": -1}).sampling().top_k == 0
    assert parse(ChatRequest, {**CHAT, "max_tokens": 5, "max_completion_tokens": 6}).limit == 6
    assert parse(ChatRequest, {**CHAT, "seed": -2}).sampling().seed == 2**64 - 2
    assert len({parse(ChatRequest, {**CHAT, "seed": -1}).sampling().seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"n": 1.0, "max_tokens": 4.0, "seed": 4.0, "top_k": 4.0, "top_logprobs": 0.0},
        {"tools": None, "tool_choice": "none", "parallel_tool_calls": False},
        {"user": "someone", "safety_identifier": "x", "prompt_cache_key": "y"},
        {"store": True, "metadata": {"a": "b"}, "verbosity": "low", "prediction": {"type": "x"}},
        # Names that resemble those of fields: of other clients and servers, or misspelt.
        {"my_proxy_tag": 1, "a b": 2, "temprature": 1, "top k": 1, "usage": {}, "models": []},
        {"client_metadata": {}, "litellm_metadata": {}, "truncation": "auto", "user_id": "u"},
        {"think": True, "separate_reasoning": True, "draft_model": "m", "intent": "chat"},
        {"return_token_ids": False, "return_tokens_as_token_ids": False, "request_id": "r"},
        {"add_special_tokens": False, "prompt_cache_options": {"ttl": "30m"}, "prompt": ""},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {"stream": True, "stream_options": {"continuous_usage_stats": False}},
        dict.fromkeys(requests.known_fields(ChatRequest) - CHAT.keys()),
        dict.fromkeys(["prompt_token_ids", "moderation", "no_such_field"]),
    ],
)
def test_unsupported_fields_with_neutral_values_are_accepted(neutral: dict[str, Any]) -> None:
    parse(ChatRequest, {**CHAT, **neutral})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("chat", completion_create_params.CompletionCreateParamsBase),
        ("completions", types.completion_create_params.CompletionCreateParamsBase),
        ("embeddings", types.EmbeddingCreateParams),
        ("responses", response_create_params.ResponseCreateParamsBase),
    ],
)
def test_fields_of_the_locked_client_are_known(name: str, parameters: type) -> None:
    """The newest client, and Anthropic's, are compared in tests/clients."""
    assert parameters.__annotations__.keys() - KNOWN_FIELDS[name] == set()


def test_unknown_fields_are_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        parse(ChatRequest, {**CHAT, "x_gateway_route": 1})
    assert caplog.text.count("request field 'x_gateway_route' is unknown, and ignored") == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ["Hi"]),
        (["Hi"], ["Hi"]),
        (["Hi", "a"], ["Hi", "a"]),
        ([1], [[1]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], [[]]),
    ],
)
def test_prompts_may_be_texts_or_ids_in_a_list_or_not(prompt: Any, expected: Any) -> None:
    parsed = parse(CompletionRequest, {**TEXT, "prompt": prompt})
    assert parsed.prompts() == expected
    assert parsed.prompt_count == len(expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [*ChatRequest.model_fields, *CompletionRequest.model_fields, "n", "tools", "user", "store"]
)


@given(st.dictionaries(FIELDS | st.text(max_size=5), JSON, max_size=5))
def test_any_json_is_parsed_or_refused_with_a_code(extra: dict[str, Any]) -> None:
    for kind, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        try:
            request = parse(kind, {**body, **extra})
            request.sampling()
            request.stops()
        except UserError:
            continue


PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text("utf-8")
SECTION = PAGE.partition("## Fields\n")[2].partition("\n## ")[0]


def test_every_field_is_in_the_section() -> None:
    known = requests.known_fields(ChatRequest) | requests.known_fields(CompletionRequest)
    assert known - set(re.findall(r"`(\w+)`", SECTION)) == set()


TOOLS_TOKENIZER = replace(TOKENIZER, chat_template=CHATML_TOOLS)
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEB = {"type": "web_search", "external_web_access": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def events_of(served: Any, **fields: Any) -> list[Any]:
    body = {"model": "small", "input": "Hi", **fields}
    with served.client().responses.create(stream=True, **body) as found:
        return list(found)


def test_tools_in_namespaces_are_called_with_them() -> None:
    """As of Codex: names of two namespaces may be the same; tools of OpenAI's server are not."""
    spaces = [{"type": "namespace", "name": name, "tools": [TOOL]} for name in ("mcp__a", "mcp__b")]
    tools: Any = [WEB, TOOL, *spaces]
    named = CALL.replace("weather", "mcp__b__weather")
    with api(tokens(f"{named}\n{CALL}"), tokenizer=TOOLS_TOKENIZER) as served:
        answer = served.client().responses.create(model="small", input="Hi", tools=tools)
        found = events_of(served, tools=tools)
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
            for item in items
        ]
        events_of(served, tools=tools, input=[*USER, *items, *results])
        prompt = TOKENIZER.tokenizer.decode(served.triton.requests[-1].values["input_ids"])
    calls = [("mcp__b", "weather"), (None, "weather")]
    assert [(item.get("namespace"), item["name"]) for item in items] == calls
    assert [(item.namespace, item.name) for item in found[-1].response.output] == calls
    added = [event.item for event in found if event.type == "response.output_item.added"]
    assert [(item.namespace, item.name) for item in added] == calls
    assert [tool.type for tool in answer.tools] == [tool["type"] for tool in tools]
    assert '"name": "mcp__a__weather"' in prompt
    assert prompt.count('{"name": "mcp__b__weather", "arguments"') == 1
    assert "web_search" not in prompt


def test_chats_have_allowed_tools_too() -> None:
    function = {"name": "weather", "parameters": TOOL["parameters"]}
    tools = [{"type": "function", "function": each} for each in (function, {"name": "other"})]
    named = [{"type": "function", "function": {"name": "weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    with api(tokens("["), tokenizer=TOOLS_TOKENIZER, guides=True) as served:
        body = {"model": "small", "messages": USER, "tools": tools, "tool_choice": choice}
        assert served.post("/v1/chat/completions", body).status_code == 200
        guide = served.triton.requests[0].values["guided_decoding_guide"]
    assert "weather" in guide
    assert "other" not in guide


def test_fields_that_were_sent_are_told_and_others_are_null() -> None:
    given = {"max_tool_calls": 2, "prompt_cache_key": "k", "safety_identifier": "s"}
    number = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "user": "me"}
    with api(THREE) as served:
        unset, sent = [
            served.post("/v1/responses", {"model": "small", "input": "Hi", **fields}).json()
            for fields in ({}, {**given, **number})
        ]
    assert (given | number).items() <= sent.items()
    assert {**dict.fromkeys(given), "presence_penalty": 0, "frequency_penalty": 0}.items() <= (
        unset.items()
    )
    assert "user" not in unset
    assert unset["completed_at"] >= unset["created_at"]


@pytest.mark.parametrize("fields", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_what_needs_a_store_is_refused_without_one(fields: dict[str, Any]) -> None:
    with api(THREE) as served:
        answer = served.post("/v1/responses", {"model": "small", "input": "Hi", **fields})
        assert served.triton.requests == []
    assert answer.status_code == 400
    assert f"{next(iter(fields))}: not supported: nothing is" in answer.text
