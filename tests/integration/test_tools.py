"""Tools over the real Cog, Triton and model, called by OpenAI's own client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from stack import REPOSITORY, Stack

pytestmark = [pytest.mark.integration, pytest.mark.full]


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: str
    unit: str | None


class Add(pydantic.BaseModel):
    """Add two numbers."""

    a: int
    b: int


KINDS: dict[str, type[pydantic.BaseModel]] = {"GetWeather": GetWeather, "Add": Add}
TOOLS: Any = [openai.pydantic_function_tool(kind) for kind in KINDS.values()]
QUESTION = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def tools_stack(engine_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server whose model is told about tools."""
    template = REPOSITORY / "configs" / "chat_templates" / "chatml-tools.jinja"
    directory = tmp_path_factory.mktemp("tools")
    running = Stack(directory, str(engine_tar), CHAT_TEMPLATE=str(template))
    with running.served():
        yield running


@pytest.fixture(scope="module")
def client(tools_stack: Stack) -> Iterator[openai.OpenAI]:
    url = f"{tools_stack.own}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def options(client: openai.OpenAI) -> dict[str, Any]:
    (model,) = client.models.list().data
    return {"model": model.id, "tools": TOOLS, "temperature": 0, "max_tokens": 200}


def test_the_model_tells_its_abilities(tools_stack: Stack, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    expected = {
        "tool_choice": ["none", "auto", "required", "function"],
        "tool_call_parser": "hermes",
        "reasoning_parser": None,
        "guided_decoding": True,
    }
    told = (model.model_extra or {})["capabilities"]
    assert {name: told[name] for name in expected} == expected
    assert "tool calls are parsed as hermes, reasoning as text" in tools_stack.output


def test_an_agent_calls_tools_and_reads_their_results(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    prompts = []
    for choice in ("required", {"type": "function", "function": {"name": "Add"}}, "none"):
        answer = client.chat.completions.create(
            messages=messages, tool_choice=choice, parallel_tool_calls=False, **options
        )
        assert answer.usage is not None
        prompts.append(answer.usage.prompt_tokens)
        (made,) = answer.choices
        messages.append(made.message)
        if choice == "none":
            break
        (call,) = made.message.tool_calls or []
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        KINDS[call.function.name].model_validate_json(call.function.arguments)
        assert made.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert made.message.content is None
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "18"})
    assert made.message.content
    assert made.message.tool_calls is None
    assert prompts[0] < prompts[1]


@pytest.mark.parametrize("parallel", [True, False])
def test_streamed_calls_join_to_the_whole(
    client: openai.OpenAI, options: dict[str, Any], parallel: bool
) -> None:
    options = {
        **options,
        "messages": [{"role": "user", "content": QUESTION}],
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
    }
    whole = client.chat.completions.create(**options).choices[0]
    joined: list[dict[str, str]] = []
    for chunk in client.chat.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                joined.append({"name": delta.function.name, "arguments": ""})
            joined[delta.index]["arguments"] += delta.function.arguments
    assert choice.finish_reason == whole.finish_reason
    made = [call.function.model_dump() for call in whole.message.tool_calls or []]
    assert joined == made
    assert bool(made) == (whole.finish_reason != "length")
    for call in made:
        KINDS[call["name"]].model_validate(json.loads(call["arguments"]))


def test_tools_may_be_called_or_not(client: openai.OpenAI, options: dict[str, Any]) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], **options
    )
    (choice,) = answer.choices
    for call in choice.message.tool_calls or []:
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert call.function.name in KINDS
    assert choice.message.content or choice.message.tool_calls


def test_strict_schemas_are_refused_where_the_grammar_lacks_something(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    function = {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}},
    }
    options = {**options, "tools": [{"type": "function", "function": function}]}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].*pattern: not supported"):
        client.chat.completions.create(
            messages=[{"role": "user", "content": "a"}], tool_choice="required", **options
        )


def test_strict_calls_are_guided_amid_text(tools_stack: Stack, client: openai.OpenAI) -> None:
    """By a trigger that any text has: a small model writes no call by itself."""
    (model,) = client.models.list().data
    assert (model.model_extra or {})["capabilities"]["strict_with_auto"] is True
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tag = {
        "type": "tag",
        "begin": ' <tool_call>\n{"name": "f", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }
    guide = {"type": "triggered_tags", "triggers": [" "], "tags": [tag]}
    ask = {"prompt": "Once upon a", "add_special_tokens": False}
    values = {
        "input_ids": httpx.post(f"{tools_stack.own}/tokenize", json=ask).json()["tokens"],
        "request_output_len": 60,
        "guided_decoding_guide_type": "structural_tag",
        "guided_decoding_guide": json.dumps({"type": "structural_tag", "format": guide}),
    }
    values["input_lengths"] = len(values["input_ids"])
    url = f"{tools_stack.triton}/v2/models/tensorrt_llm/generate"
    tokens = httpx.post(url, json=values, timeout=60).json()["output_ids"]
    text = httpx.post(f"{tools_stack.own}/detokenize", json={"tokens": tokens}).json()["prompt"]
    calls = re.findall(r" <tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    assert calls, text
    for call in map(json.loads, calls):
        assert call["name"] == "f"
        assert isinstance(call["arguments"]["a"], bool)
    assert text.count(" <tool_call>") <= len(calls) + 1, "the last one may be cut"
