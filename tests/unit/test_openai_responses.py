"""The stateless /v1/responses, seen by OpenAI's own client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from chat_templates import CHATML_TOOLS
from openai_server import THREE, TOKENIZER, USER, api, tokens
from scripted_triton import event

from cog_triton.serving.openai.responses_request import read, translate

TOOLS_TOKENIZER = replace(TOKENIZER, chat_template=CHATML_TOOLS)
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEB = {"type": "web_search", "external_web_access": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


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


def test_json_schemas_guide_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    with api(tokens('{"a": 1}'), guides=True) as served:
        answer = served.client().responses.create(
            model="small",
            input="Hi",
            text={"format": form},  # type: ignore[typeddict-item]
        )
        assert served.triton.requests[0].values["guided_decoding_guide_type"] == "json_schema"
    assert answer.output_text == '{"a": 1}'


def test_an_answer_without_text_has_a_message() -> None:
    with api([]) as served:
        (item,) = served.client().responses.create(model="small", input="Hi").output
    assert item.type == "message"


def test_an_error_within_the_stream_is_raised_by_the_client() -> None:
    parts = [*tokens("the "), event(error="it broke")]
    with api(parts) as served, pytest.raises(openai.APIError, match="it broke"):
        events_of(served)


def test_what_no_text_depends_on_is_taken() -> None:
    body = {"model": "m", "input": "Hi", "store": True, "truncation": "auto", "user": "u"}
    body |= {"include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}
    body |= {"previous_response_id": None, "background": False, "reasoning": {"effort": "low"}}
    body |= {"client_metadata": {"x-codex-turn": "1"}, "moderation": None, "image": None}
    chat, echoed, _ = translate(read(body))
    assert chat == {"model": "m", "messages": USER, "reasoning_effort": "low"}
    assert echoed["metadata"] == {"a": "b"}


def test_the_model_sees_the_allowed_tools_alone() -> None:
    tools = [TOOL, {**TOOL, "name": "n" * 128}]
    with api(tokens(CALL), tokenizer=TOOLS_TOKENIZER) as served:
        body = {"model": "small", "input": "Hi", "tools": tools}
        asked = served.post("/v1/responses", {**body, "tool_choice": allowed("auto", "weather")})
        served.post("/v1/responses", body)
        texts = [
            TOKENIZER.tokenizer.decode(request.values["input_ids"], skip_special_tokens=False)
            for request in served.triton.requests
        ]
    assert asked.json()["output"][0]["name"] == "weather"
    assert asked.json()["tool_choice"]["mode"] == "auto"
    assert [("weather" in text, "n" * 128 in text) for text in texts] == [
        (True, False),
        (True, True),
    ]


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
