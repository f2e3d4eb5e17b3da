"""Tools and reasoning in the OpenAI API, seen by OpenAI's own client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from chat_templates import CHATML_TOOLS, SMOLLM2
from openai_server import THREE, TOKENIZER, USER, api, tokens
from scripted_triton import event
from tokenizers import Tokenizer

from cog_triton.engines.base import Abilities
from cog_triton.engines.openvino import guides
from cog_triton.text.tokenizer import EngineTokenizer

TOOLS_TOKENIZER = replace(TOKENIZER, chat_template=CHATML_TOOLS)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 1}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS: Any = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REQUIRED = '[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def pieces(text: str) -> Any:
    return tokens(*text)


def create(served: Any, **options: Any) -> Any:
    options = {"tools": TOOLS, "messages": USER, **options}
    return served.client().chat.completions.create(model="small", **options)


@pytest.mark.parametrize("text", ["Let me see. ", ""])
def test_calls_are_in_the_message(text: str) -> None:
    with api(pieces(f"{text}{CALL}"), tokenizer=TOOLS_TOKENIZER) as served:
        answer = create(served)
        prompt = served.prompt
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (text or None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.id.isalnum()
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert answer.usage.completion_tokens == sum(len(TOKENIZER.encode(c)) for c in text + CALL)
    for tool in TOOLS:
        assert json.dumps(tool) in prompt


def test_one_call_is_answered_unless_calls_are_parallel() -> None:
    with api(pieces(CALL + CALL), tokenizer=TOOLS_TOKENIZER) as served:
        answer = create(served, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("template", [CHATML_TOOLS, SMOLLM2])
def test_required_calls_are_guided(template: str) -> None:
    tokenizer = replace(TOKENIZER, chat_template=template)
    with api(pieces(REQUIRED), tokenizer=tokenizer, guides=True) as served:
        answer = create(served, tool_choice="required")
        request = served.triton.requests[0].values
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    schema = json.loads(request["guided_decoding_guide"])
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"const": "get_weather"}
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert first["properties"]["arguments"] == city
    assert second["properties"]["arguments"] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_a_named_call_is_guided_by_its_parameters() -> None:
    with api(pieces('{"city": "Rome"}'), tokenizer=TOOLS_TOKENIZER, guides=True) as served:
        answer = create(served, tool_choice=NAMED)
        chunks = list(create(served, tool_choice=NAMED, stream=True))
        schema = json.loads(served.triton.requests[0].values["guided_decoding_guide"])
    assert schema["required"] == ["city"]
    assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(delta.function.arguments for delta in deltas) == '{"city": "Rome"}'


def test_tools_beside_a_json_answer_are_guided_to_either() -> None:
    form: Any = {"type": "json_object"}
    with api(pieces('{"a": 1}'), tokenizer=TOOLS_TOKENIZER, guides=True) as served:
        answer = create(served, response_format=form)
        schema = json.loads(served.triton.requests[0].values["guided_decoding_guide"])
        served.triton.answer_with(pieces(REQUIRED))
        called = create(served, response_format=form)
    assert [kind["type"] for kind in schema["anyOf"]] == ["array", "object"]
    assert answer.choices[0].message.content == '{"a": 1}'
    assert called.choices[0].finish_reason == "tool_calls"


STRICT = json.loads(json.dumps(WEATHER))
STRICT["function"]["strict"] = True


TAGGING = Abilities(guides={"json_schema"}, structural_tags=True, check_guide=guides.check)
STRICT_TIME: Any = {"type": "function", "function": {"name": "get_time", "strict": True}}


def test_strict_calls_are_guided_from_their_opening_on() -> None:
    with api(pieces(f"Hi. {CALL}"), tokenizer=TOOLS_TOKENIZER, abilities=TAGGING) as served:
        create(served)
        answer = create(served, tools=[WEATHER, STRICT_TIME])
        free, guided = (request.values for request in served.triton.requests)
        with pytest.raises(openai.BadRequestError, match="minLength: not supported"):
            create(served, tools=[STRICT])
        (model,) = served.client().models.list().data
    assert "guided_decoding_guide" not in free
    assert guided["guided_decoding_guide_type"] == "structural_tag"
    tags = json.loads(guided["guided_decoding_guide"])["format"]["tags"]
    assert [tag["content"]["json_schema"] for tag in tags] == [
        {"type": "object"},
        {"properties": {}, "additionalProperties": False},
    ]
    assert (model.model_extra or {})["capabilities"]["strict_with_auto"] is True
    assert answer.choices[0].message.content == "Hi. "
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("options", "guides", "template", "words"),
    [
        ({"tool_choice": "required"}, False, CHATML_TOOLS, "tool_choice='required': not supported"),
        ({"tool_choice": NAMED}, False, CHATML_TOOLS, "tool_choice='function': not supported"),
        (
            {"response_format": {"type": "json_object"}},
            False,
            CHATML_TOOLS,
            "response_format: only",
        ),
        ({}, True, SMOLLM2, "tools: the model's chat template .* CHAT_TEMPLATE"),
        ({}, True, "{{ tools }}", "tools: it is not known .* TOOL_CALL_PARSER"),
        ({}, True, "{{ tools }}func_name1(", "tools: only vllm:pythonic reads this model's calls"),
        (
            {"tools": [STRICT], "tool_choice": "required"},
            True,
            CHATML_TOOLS,
            r"tools\[0\].function.parameters.properties.city.minLength: not supported",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": []}}},
            True,
            CHATML_TOOLS,
            "set by the server",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    options: dict[str, Any], guides: bool, template: str, words: str
) -> None:
    tokenizer = replace(TOKENIZER, chat_template=template)
    with (
        api(THREE, tokenizer=tokenizer, guides=guides) as served,
        pytest.raises(openai.BadRequestError, match=words) as caught,
    ):
        create(served, **options)
    assert caught.value.code == "E1005"
    assert caught.value.param in (*options, *options.get("extra_body", ()), "tools")


@pytest.mark.parametrize(
    ("options", "prompt", "said", "reasoning", "content"),
    [
        ({}, "assistant\n", "<think>Hm</think>Hi", "Hm", "Hi"),
        ({}, "assistant\n", "Hi", None, "Hi"),
        ({"reasoning_effort": "low"}, "<think>\n", "Hm</think>Hi", "Hm", "Hi"),
        ({"reasoning_effort": "none"}, "</think>\n\n", "Hi", None, "Hi"),
        ({"extra_body": {"include_reasoning": False}}, "", "<think>Hm</think>Hi", None, "Hi"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
            "<think>\n",
            "Hm",
            "Hm",
            None,
        ),
        ({}, "assistant\n", f"<think>Hm</think>{CALL}", "Hm", None),
    ],
)
def test_reasoning_is_apart(
    options: Any, prompt: str, said: str, reasoning: str | None, content: str | None
) -> None:
    with api(pieces(said), tokenizer=TOOLS_TOKENIZER) as served:
        message = create(served, **options).choices[0].message
        chunks = list(create(served, stream=True, **options))
        assert served.prompt.endswith(prompt)
    extra = message.model_extra
    assert extra.get("reasoning_content") == extra.get("reasoning") == reasoning
    assert message.content == content
    assert (message.tool_calls is not None) == (CALL in said)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        joined = "".join(delta.model_extra.get(name, "") for delta in deltas)
        assert joined == (reasoning or "")
    assert "".join(delta.content or "" for delta in deltas) == (content or "")


def with_special(*specials: str) -> EngineTokenizer:
    made = Tokenizer.from_str(TOKENIZER.tokenizer.to_str())
    made.add_special_tokens(list(specials))
    return replace(TOOLS_TOKENIZER, tokenizer=made)


def test_marks_that_are_special_tokens_are_seen_by_parsers_and_not_by_others() -> None:
    tokenizer = with_special("<tool_call>", "</tool_call>", "<think>", "</think>", "<secret>")
    said = f"<think>Hm</think><secret>ok{CALL}"
    scripted = [event(output_ids=tokenizer.encode(said))]
    with api(scripted, tokenizer=tokenizer) as served:
        message = create(served).choices[0].message
        plain = create(served, tool_choice="none").choices[0].message
        text = served.client().completions.create(model="small", prompt="the").choices[0].text
    assert message.model_extra["reasoning"] == plain.model_extra["reasoning"] == "Hm"
    assert message.content == "ok"
    assert message.tool_calls[0].function.name == "get_weather"
    inner = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert plain.content == f"ok{inner}"
    assert text == f"Hmok{inner}"
