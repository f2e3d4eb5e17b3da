"""Chat messages: validation, and rendering by chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_templates import SMOLLM2
from small_tokenizers import byte_level

from cog_triton.errors import BadMessages, InvalidArgument
from cog_triton.text.chat import UNPARSED, parse_messages, render_messages
from cog_triton.text.tokenizer import EngineTokenizer

USER = {"role": "user", "content": "Hi"}


TOOL = {"role": "tool", "content": "4"}
DEEP = '{"a":' * 70 + "1" + "}" * 70


def called(call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tokenizer(template: str | None, bos: str | None = None, eos: str | None = None) -> Any:
    return EngineTokenizer(byte_level(), chat_template=template, bos_token=bos, eos_token=eos)


def test_messages_are_role_and_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    value = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "audio": None},
    ]
    assert parse_messages(value) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


def test_calls_of_tools_come_as_templates_expect_them() -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    value = [
        {**USER, "name": "Ann"},
        {**called(call), "reasoning_content": "Hm.", "refusal": None, "function_call": None},
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "4"}]},
        {"role": "assistant", "content": "Four", "reasoning": "So.", "tool_calls": []},
        called({"function": {"name": "f", "arguments": ""}}),
    ]
    function = {"name": "f", "arguments": {"x": [1]}}
    assert parse_messages(value) == [
        {**USER, "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a1", "type": "function", "function": function}],
        },
        {**TOOL, "tool_call_id": "a1"},
        {"role": "assistant", "content": "Four", "reasoning_content": "So."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        },
    ]


@pytest.mark.parametrize(
    "template", ["{{ a | tojson }}", "{% for k, v in a.items() %}{% endfor %}"]
)
@pytest.mark.parametrize(
    ("text", "read"),
    [
        (None, {}),
        ("", {}),
        (" \n", {}),
        (" null", {}),
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        *(
            (text, {UNPARSED: text})
            for text in (
                *('{"a": ', "[]", "3", '{"a": NaN}', '{"a": 1}{"b": 2}', '{"a": "\\ud83e"}'),
                *(DEEP, "[" * 99999, '{"a": ' + "9" * 65 + "}", '{"a": 1e400}'),
            )
        ),
    ],
)
def test_arguments_of_past_calls_are_an_object(text: Any, read: Any, template: str) -> None:
    message = called({"function": {"name": "f", "arguments": text}})
    (parsed,) = parse_messages([message])
    assert parsed["tool_calls"][0]["function"]["arguments"] == read
    shown = tokenizer(template.replace("a", "messages[0].tool_calls[0].function.arguments", 1))
    assert UNPARSED not in read or render_messages([parsed], None, shown)


def test_calls_have_a_bound_of_values() -> None:
    many = called({"function": {"name": "f", "arguments": '{"a": [' + "0," * 99999 + "0]}"}})
    with pytest.raises(InvalidArgument, match="arguments of tool calls have some 30"):
        parse_messages([many, many, many])


@pytest.mark.parametrize("message", [called({"function": {"name": "f"}}), TOOL])
def test_calls_that_a_template_would_leave_out_are_refused(message: dict[str, Any]) -> None:
    messages = parse_messages(
        [USER, {**message, **({"tool_call_id": "a"} if message is TOOL else {})}]
    )
    with pytest.raises(BadMessages, match=r"messages\[1\]: .* set CHAT_TEMPLATE"):
        render_messages(messages, None, tokenizer(SMOLLM2))


def test_tools_are_rendered_by_the_template_for_tools() -> None:
    both = EngineTokenizer(
        byte_level(), chat_template="plain", tool_template="{{ tools | tojson }}"
    )
    assert render_messages([USER], None, both).text == "plain"
    assert render_messages([USER], None, both, {"tools": [{"a": "ü"}]}).text == '[{"a": "ü"}]'
    one = tokenizer("{{ tools is defined }} {{ enable_thinking }}")
    assert render_messages([USER], None, one, {"enable_thinking": False}).text == "False False"


def test_the_shipped_template_tells_of_tools_and_calls() -> None:
    path = Path(__file__).parents[2] / "configs" / "chat_templates" / "chatml-tools.jinja"
    shipped = tokenizer(SMOLLM2).with_template(path)
    call = {"id": "a1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    result = {**TOOL, "tool_call_id": "a1"}
    messages = parse_messages([USER, called(call), result])
    assert render_messages(messages, "Be brief.", shipped, {"tools": [{"name": "f"}]}).text == (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n<tools>\n"
        '{"name": "f"}\n</tools>\nFor each call, write a JSON object with the name and arguments'
        ' within tags:\n<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render_messages([USER], None, shipped).text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ (messages|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{{ '%s'|format(messages.__len__) }}{{ range(10**9)|list }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    with pytest.raises(BadMessages, match="E1006"):
        render_messages([USER], None, tokenizer(attack))
