"""/v1/messages, Anthropic's API; its released client runs in tests/clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from chat_templates import CHATML_TOOLS
from openai_server import THREE, TOKENIZER, Served, api, tokens
from scripted_triton import event

from cog_triton.serving.openai.messages_request import translate

TOOLS_TOKENIZER = replace(TOKENIZER, chat_template=CHATML_TOOLS)
WEATHER = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
    "input_examples": [{"city": "Oslo"}],
    "descripton": "x",
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
BODY: dict[str, Any] = {
    "model": "small",
    "max_tokens": 90,
    "messages": [{"role": "user", "content": "Hi"}],
}


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    answer = served.post("/v1/messages", {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    answer = served.post("/v1/messages", {**BODY, **fields, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for text in answer.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = text.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client of a stream has at its end."""
    message: dict[str, Any] = events[0]["message"]
    for item in events[1:]:
        match item["type"]:
            case "content_block_start":
                assert item["index"] == len(message["content"])
                message["content"].append({**item["content_block"], "json": ""})
            case "content_block_delta":
                block = message["content"][item["index"]]
                ((name, text),) = (pair for pair in item["delta"].items() if pair[0] != "type")
                block["json" if name == "partial_json" else name] += text
            case "content_block_stop":
                block = message["content"][item["index"]]
                if text := block.pop("json"):
                    block["input"] = json.loads(text)
            case "message_delta":
                message |= {**item["delta"], "usage": item["usage"]}
    return message


def without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    content = [{**block, "id": ""} for block in message["content"]]
    return {**message, "id": "", "content": content}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}


def prompt_of(served: Served, place: int = -1) -> str:
    ids = served.triton.requests[place].values["input_ids"]
    return str(TOKENIZER.tokenizer.decode(ids, skip_special_tokens=False))


def test_the_end_has_its_reason() -> None:
    with api(THREE, stop_sequences="größer") as served:
        assert ask(served)["stop_reason"] == "end_turn"  # it is the server's own
        own = {"stop_sequences": ["zzz", "quick"]}
        whole, streamed = ask(served, **own), joined(events_of(served, **own))
        cut = ask(served, max_tokens=len(TOKENIZER.encode("the ")), stop_sequences=[])
    for found in (whole, streamed):
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "quick")
        assert found["content"] == [text_block("the ")]
    assert cut["stop_reason"] == "max_tokens"


def test_calls_go_out_and_their_results_come_back() -> None:
    with api(tokens("Let me see. ", CALL), tokenizer=TOOLS_TOKENIZER) as served:
        answer = ask(served, tools=[WEATHER])
        assert without_ids(joined(events_of(served, tools=[WEATHER]))) == without_ids(answer)
        text, call = answer["content"]
        assert text["type"] == "text"
        assert {**call, "id": ""} == {
            **{"type": "tool_use", "id": "", "name": "weather", "input": {"city": "Rome"}},
            "caller": {"type": "direct"},
        }
        assert answer["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"]}
        several = [{"type": "text", "text": "it"}, {"type": "text", "text": "rains"}]
        turns = [
            *BODY["messages"],
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [{**result, "content": "sunny"}]},
            # Consecutive turns of a role are one.
            {
                "role": "user",
                "content": [
                    {**result, "content": several, "is_error": True},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ]
        ask(served, tools=[WEATHER], messages=turns)
        prompt = prompt_of(served)
    ordered = ["Weather of a city.", "Let me see.", "Rome", "sunny", "Error:\nit\nrains", "And now"]
    places = [prompt.index(word) for word in ordered]
    assert places == sorted(places)
    assert "ephemeral" not in prompt


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
    streamed = joined(found)
    assert without_ids(streamed) == without_ids(answer)
    reasoning = sum(len(TOKENIZER.encode(text)) for text in ("<think>hm", " so</think>"))
    details = [made["usage"]["output_tokens_details"] for made in (answer, streamed)]
    assert details == [{"thinking_tokens": reasoning}] * 2
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


def test_tokens_are_counted() -> None:
    with api(THREE, tokenizer=TOOLS_TOKENIZER) as served:
        fields = {"system": [{"type": "text", "text": "Rhyme."}], "tools": [WEATHER]}
        body = {name: value for name, value in BODY.items() if name != "max_tokens"} | fields
        counted = served.post("/v1/messages/count_tokens", body)
        assert counted.json() == {"input_tokens": ask(served, **fields)["usage"]["input_tokens"]}
        other = served.post("/v1/messages/count_tokens", {**body, "model": "other"})
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")


def user_turn(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [
        ("E1002 PromptTooLong: too long", 400, "invalid_request_error"),
        ("E2101 TritonTimeout: slow", 504, "timeout_error"),
        ("E2105 TritonUnavailable: gone", 503, "overloaded_error"),
        ("E2107 Overloaded: full", 429, "rate_limit_error"),
        ("E2100 TritonUnknownError: odd", 500, "api_error"),
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


def test_bodies_and_paths_and_keys_are_refused_in_that_shape() -> None:
    with api(THREE, openai_api_key="secret", max_request_bytes=1000) as served:
        key = {"x-api-key": "secret", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        long = {**BODY, "system": "x" * 2000}
        answers = {
            401: served.post("/v1/messages", BODY, headers={"x-api-key": "wrong"}),
            413: served.post("/v1/messages", long, headers=key),
            404: served.post("/v1/messages/batches", BODY, headers=key),
            415: served.post("/v1/messages", content=b"{}", headers=key),
        }
        assert served.post("/v1/messages", BODY, headers=key).status_code == 200
    for status, answer in answers.items():
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"].keys() == {"type", "message"}
    assert answers[401].json()["error"]["type"] == "authentication_error"


def test_an_answer_without_text_has_no_blocks() -> None:
    with api([]) as served:
        assert ask(served)["content"] == []
        assert [item["type"] for item in events_of(served)][2:] == ["message_delta", "message_stop"]
