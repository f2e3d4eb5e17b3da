"""Parsers are chosen by what a chat template contains, or by setting."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import CHATML_TOOLS, LLAMA_3, MISTRAL, QWEN, SMOLLM2
from small_tokenizers import byte_level

from cog_triton.serving.openai.parsers.formats import call_parser, reasoning_parser
from cog_triton.settings import load_settings
from cog_triton.text.template_process import template_variables
from cog_triton.text.tokenizer import EngineTokenizer

TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"


def tokenizer(template: str | None, tools: str | None = None) -> EngineTokenizer:
    return EngineTokenizer(byte_level(), chat_template=template, tool_template=tools)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (None, None, None),
        (SMOLLM2, None, None),
        (LLAMA_3, None, None),
        (MISTRAL, None, None),
        (QWEN, None, "think"),
        (CHATML_TOOLS, "hermes", "think"),
        (TOOLS + "[TOOL_CALLS]", "mistral", None),
        (TOOLS + "[TOOL_CALLS][THINK][/THINK]", "mistral", "mistral"),
        (TOOLS + "<tool_call>\n<function=f>", None, None),
        (TOOLS + "<tool_call>f<arg_key>", None, None),
        (TOOLS + "{{ '<|python_tag|>' }}", "llama3_json", None),
        (
            TOOLS + 'Respond as {"name": name, "parameters": dictionary of names}',
            "llama3_json",
            None,
        ),
        (TOOLS + "[func_name1(params_name1=params_value1)]", "pythonic", None),
        (TOOLS + "<|tool_list_start|>", "pythonic", None),
        (TOOLS, None, None),
        ("<tool_call> without tools", None, None),
        ("{% if", None, None),
    ],
)
def test_a_template_tells(template: str | None, calls: str | None, reasoning: str | None) -> None:
    settings, known = load_settings(), tokenizer(template)
    assert (call_parser(settings, known), reasoning_parser(settings, known)) == (calls, reasoning)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tool_call_parser": "mistral", "reasoning_parser": "mistral"}, ("mistral", "mistral")),
        ({"tool_call_parser": "none", "reasoning_parser": "none"}, (None, None)),
        ({"tool_call_parser": "", "reasoning_parser": "auto"}, ("hermes", "think")),
    ],
)
def test_settings_come_first(options: Any, expected: Any) -> None:
    settings, known = load_settings(**options), tokenizer(CHATML_TOOLS)
    assert (call_parser(settings, known), reasoning_parser(settings, known)) == expected


def test_the_template_for_tools_tells_of_calls() -> None:
    assert call_parser(load_settings(), tokenizer(SMOLLM2, CHATML_TOOLS)) == "hermes"


def test_variables_are_found_without_running_the_template() -> None:
    source = "{% if tools and x.y %}{{ raise_exception('no') }}{% set z = 1 %}{% endif %}"
    assert template_variables(source) == {"tools", "x", "raise_exception"}
    assert template_variables("{" * 3 + "(" * 9999) == frozenset()
