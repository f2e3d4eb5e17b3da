"""Answers are taken back as clients send them with the next request, whatever the model wrote.

Requests and histories have the shapes of the released openai and anthropic clients and of agents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jiter
import pytest
from chat_templates import CHATML_TOOLS
from hypothesis import example, given
from hypothesis import strategies as st
from loop_thread import call
from openai_server import TOKENIZER, Served, api, tokens

from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.stored_responses import RunningResponses

Object = dict[str, Any]
ITEMS = "{% for name, value in call.function.arguments.items() %}{% endfor %}"
CALLS = "{%- for call in message.tool_calls or [] %}"
TEMPLATE = CHATML_TOOLS.replace(CALLS, CALLS + ITEMS)
FORMS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": %s}]',
}
ARGUMENTS = (
    *('{"a": [1, "x"]}', '{"a": "x\ny\tz"}', '{"a": NaN}', '{"a": 1', '{"a": 1}, "reason": "x"'),
    *('{"a": 1}}', '{"a": 1}{"b": 2}', "null", "[]", '""', "{}", "3", " ", "{'a': 1}", '{"a": 1,}'),
    *('{"a": "\\ud83e"}', '{"a": "it\\\'s"}', '{"a": "say "hi""}', '{"a": ' + "[" * 70),
)
FUNCTION: Object = {"name": "f", "parameters": {"type": "object", "properties": {}}}
USER: Object = {"role": "user", "content": "go on"}


def chat(found: Any) -> tuple[list[Object], list[Object]]:
    """The answer as an item of the history, and the results of its calls."""
    if isinstance(found, list):
        message: Object = {"role": "assistant", "content": None}
        calls: dict[int, Object] = {}
        for delta in (choice["delta"] for chunk in found for choice in chunk["choices"]):
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", []):
                known = calls.setdefault(call["index"], {**call, "function": {"arguments": ""}})
                text = known["function"]["arguments"] + call["function"].get("arguments", "")
                known["function"] |= {**call["function"], "arguments": text}
        message |= {"tool_calls": list(calls.values())} if calls else {}
    else:
        message = found["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "ok"}]}
        for call in message.get("tool_calls") or []
    ]
    return [message], results


def responses(found: Any) -> tuple[list[Object], list[Object]]:
    """See `chat`."""
    output = (found[-1]["response"] if isinstance(found, list) else found)["output"]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    return output, [
        {"type": "function_call_output", "call_id": call, "output": "ok"} for call in calls
    ]


def messages(found: Any) -> tuple[list[Object], list[Object]]:
    """See `chat`; a stream's calls have what the client reads of JSON that is cut."""
    content: list[Object] = [] if isinstance(found, list) else found["content"]
    texts: dict[int, str] = {}
    for event in found if isinstance(found, list) else []:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"]})
        for name, text in event.get("delta", {}).items():
            if name == "partial_json":
                texts[event["index"]] = texts.get(event["index"], "") + text
            elif name in ("text", "thinking", "signature"):
                content[event["index"]][name] += text
    for place, text in texts.items():
        try:
            content[place]["input"] = jiter.from_json(text.encode(), partial_mode=True)
        except ValueError:  # where the client fails, Claude Code sends this
            content[place]["input"] = {"__unparsedToolInput": {"raw": text, "len": len(text)}}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        for block in content
        if block["type"] == "tool_use"
    ]
    turn = {"role": "assistant", "content": content}
    return [turn], [{"role": "user", "content": results}] if results else []


APIS: dict[str, tuple[str, Callable[[Any], tuple[list[Object], list[Object]]], Object]] = {
    "chat": ("messages", chat, {"tools": [{"type": "function", "function": FUNCTION}]}),
    "responses": ("input", responses, {"tools": [{"type": "function", **FUNCTION}]}),
    "messages": (
        "messages",
        messages,
        {"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}], "max_tokens": 900},
    ),
}
PATHS = {"chat": "/v1/chat/completions"}


def ask(served: Served, name: str, history: list[Object], fields: Object) -> Any:
    """The answer, or the events of its stream."""
    body = {"model": "small", **APIS[name][2], APIS[name][0]: history, **fields}
    answer = served.post(PATHS.get(name, f"/v1/{name}"), body)
    assert answer.status_code == 200, (answer.text, body)
    if not body.get("stream"):
        return answer.json()
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(item) for key, item in value.items() if item is not None}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """A server for each format of calls."""
    tokenizer = replace(TOKENIZER, chat_template=TEMPLATE)
    with ExitStack() as stack:
        found = {}
        for parser in FORMS:
            path = tmp_path_factory.mktemp(parser) / "responses"
            file = ResponseFile(path, 1 << 24, 3600)
            stack.callback(file.close)
            store = call(RunningResponses, file, 8, 60)
            options: Any = {"tool_call_parser": parser, "reasoning_parser": "think"}
            served = api([], tokenizer=tokenizer, store=store, context=20_000, **options)
            found[parser] = stack.enter_context(served)
        yield found


@given(
    name=st.sampled_from(list(APIS)),
    parser=st.sampled_from(list(FORMS)),
    before=st.sampled_from(["", "<think>hm", "<think>hm</think>", "<think>hm</think>Hi. "]),
    arguments=st.sampled_from(ARGUMENTS),
    cut=st.integers(0, 120),
    limited=st.booleans(),
    streamed=st.booleans(),
)
@example("chat", "hermes", "<think>hm", "{}", 9, True, False)
@example("chat", "hermes", "", '{"a": 1', 120, False, False)
@example("responses", "hermes", "<think>hm", "{}", 9, False, False)
@example("responses", "mistral", "", '{"a": "x"}', 46, True, True)
@example("messages", "llama3_json", "", '{"a": "x"}', 35, True, True)
def test_an_answer_is_taken_back(
    servers: dict[str, Served],
    name: str,
    parser: str,
    before: str,
    arguments: str,
    cut: int,
    limited: bool,
    streamed: bool,
) -> None:
    served = servers[parser]
    text = (before + FORMS[parser] % arguments)[:cut]
    served.triton.answer_with(tokens(text) if text else [])
    limit = {"max_tokens": len(TOKENIZER.encode(text)) if limited and text else 900}
    found = ask(served, name, [USER], {**limit, "stream": streamed})
    answer, results = APIS[name][1](found)
    for items in (answer, without_nulls(answer)):
        ask(served, name, [USER, *items, *results, USER], limit)
    if name == "responses":
        identity = found[-1]["response"]["id"] if streamed else found["id"]
        ask(served, name, [*results, USER], {**limit, "previous_response_id": identity})
