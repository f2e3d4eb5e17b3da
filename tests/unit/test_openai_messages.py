"""/v1/messages, Anthropic's API; its released client runs in tests/clients."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from openai_server import TOKENIZER, Served, api, tokens
from scripted_triton import event

from cog_triton.serving.openai.messages_request import translate

WEATHER = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
    "input_examples": [{"city": "Oslo"}],
    "descripton": "x",
}
BODY: dict[str, Any] = {
    "model": "small",
    "max_tokens": 90,
    "messages": [{"role": "user", "content": "Hi"}],
}


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = served.ask("messages", **{**BODY, **fields})
    return found


def events_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    return served.events("messages", **{**BODY, **fields})


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": False},
            {
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": True,
            },
        ),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    chat = translate({**BODY, "tools": [WEATHER], "tool_choice": choice}, images=False)
    assert {key: chat[key] for key in expected} == expected
    function = {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": WEATHER["input_schema"],
    }
    assert chat["tools"] == [{"type": "function", "function": function}]


def test_reasoning_is_a_block_that_is_taken_back() -> None:
    parts = tokens("<think>hm", " so</think>", "Yes.")
    with api(parts, reasoning_parser="think") as served:
        answer = ask(served, thinking={"type": "enabled", "budget_tokens": 1024})
        found = events_of(served)
        hidden = ask(served, thinking={"type": "disabled"})
        omitted = ask(served, thinking={"type": "adaptive", "display": "omitted"})
    thinking = {"type": "thinking", "thinking": "hm so", "signature": ""}
    assert answer["content"] == [thinking, text_block("Yes.")]
    reasoning = sum(len(TOKENIZER.encode(text)) for text in ("<think>hm", " so</think>"))
    for made in (answer, found[-2]):
        assert made["usage"]["output_tokens_details"] == {"thinking_tokens": reasoning}
    deltas = [item["delta"]["type"] for item in found if item["type"] == "content_block_delta"]
    kinds = [kind for kind, _ in groupby(deltas)]  # pieces may come together
    assert kinds == ["thinking_delta", "signature_delta", "text_delta"]
    assert hidden["content"] == omitted["content"] == [text_block("Yes.")]
    turn = {"role": "assistant", "content": [*answer["content"], {"type": "redacted_thinking"}]}
    chat = translate({**BODY, "messages": [turn, {"role": "user", "content": "ok"}]}, images=False)
    assert chat["messages"][0]["reasoning_content"] == "hm so"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "enabled"}}, {"reasoning_effort": "medium"}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}},
            {"reasoning_effort": "max"},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "object"}},
                }
            },
        ),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"metadata": {"user_id": "u"}, "betas": ["b"], "container": None}, {}),
        ({"seed": 3, "min_p": 0.1}, {"seed": 3, "min_p": 0.1}),
        ({"stop_sequence": ["a"], **dict.fromkeys(["n", "system"])}, {"stop_sequence": ["a"]}),
        # Of Claude Code; it differs with each request.
        ({"system": [{"type": "text", "text": "x-anthropic-billing-header: a=b;"}]}, {}),
    ],
)
def test_fields_have_their_like_in_chats(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    message = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    plain = {"model": "small", "max_tokens": 90, "messages": message}
    found = translate({**BODY, **fields}, images=False)
    assert {key: found[key] for key in (*plain, *expected)} == {**plain, **expected}
    assert found.keys() - {*plain, *expected} <= {"include_reasoning"}


def user_turn(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [
        ("E1002 PromptTooLong: too long", 400, "invalid_request_error"),
        ("E2101 TritonTimeout: slow", 504, "timeout_error"),
        ("E2107 Overloaded: full", 429, "rate_limit_error"),
    ],
)
def test_errors_of_the_engine(text: str, status: int, kind: str, streamed: bool) -> None:
    with api([event(error=text)]) as served:
        answer = served.post("/v1/messages", {**BODY, "stream": streamed})
    found = answer.json()
    assert (answer.status_code, found["error"]["type"]) == (status, kind)
    assert found["error"]["message"].startswith(text)
    assert ("prompt is too long" in found["error"]["message"]) is text.startswith("E1002")


def test_an_error_within_the_stream_is_its_last_event() -> None:
    with api([*tokens("the "), event(error="E2107 Overloaded: full")]) as served:
        found = events_of(served)
    error = {"type": "rate_limit_error", "message": "E2107 Overloaded: full"}
    assert found[-1] == {"type": "error", "error": error}
