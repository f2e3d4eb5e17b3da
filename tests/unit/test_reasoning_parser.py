"""Reasoning before an answer, with vLLM's cases, and how parsers are chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from chat_templates import CHATML_TOOLS, LLAMA_3, MISTRAL, QWEN, SMOLLM2
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level

from cog_triton.serving.openai.parsers.answer_parser import AnswerParser, ReasoningParser
from cog_triton.serving.openai.parsers.call_parser import (
    Answer,
    Call,
    HermesParser,
    call_parser,
    join,
    reasoning_parser,
)
from cog_triton.settings import load_settings
from cog_triton.text.chat_template import template_variables
from cog_triton.text.tokenizer import EngineTokenizer


def parse(pieces: Iterable[str], *, opened: bool = False, include: bool = True) -> Answer:
    parser = AnswerParser(
        ReasoningParser("<think>", "</think>", opened=opened),
        HermesParser(["f"]),
        include_reasoning=include,
    )
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return join([*deltas, *parser.finish()])


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>a section</think>the rest", False, "a section", "the rest"),
        ("a section</think>the rest", True, "a section", "the rest"),
        ("<think>a section</think>the rest", True, "a section", "the rest"),
        ("<think>a section</think>", False, "a section", ""),
        ("<think>no end", False, "no end", ""),
        ("no end", True, "no end", ""),
        (
            "\n<think>\nfirst\nsecond</think>\n\nrest\nend",
            False,
            "\nfirst\nsecond",
            "\n\nrest\nend",
        ),
        ("<think></think>rest", False, "", "rest"),
        ("no reasoning", False, "", "no reasoning"),
        ("An <think>example</think>", False, "", "An <think>example</think>"),
        ("a</think> is <think>b</think>", False, "", "a</think> is <think>b</think>"),
        ("<think>a</think>b</think>", False, "a", "b</think>"),
        ("<think>x < y </thin></think>b", False, "x < y </thin>", "b"),
        (" ", False, "", " "),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_split_off(text: str, opened: bool, reasoning: str, content: str) -> None:
    expected = Answer(content, reasoning)
    assert parse([text], opened=opened) == parse(text, opened=opened) == expected
    for place in range(len(text)):
        assert parse([text[:place], text[place:]], opened=opened) == expected
    assert parse(text, opened=opened, include=False) == Answer(content)


def test_calls_are_looked_for_behind_the_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    expected = Answer("", f"Say {call}?", [Call("f", "{}")])
    assert parse(f"<think>Say {call}?</think>\n\n{call}") == expected


PIECES = st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n", "ü", "<thi"])


@given(st.lists(PIECES, max_size=9), st.booleans())
def test_every_cut_gives_the_same(pieces: list[str], opened: bool) -> None:
    whole = parse(["".join(pieces)], opened=opened)
    assert parse(pieces, opened=opened) == parse("".join(pieces), opened=opened) == whole
    assert len(whole.reasoning) + len(whole.content) <= len("".join(pieces))


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
        (TOOLS + "[func_name1(params_name1=params_value1)]", None, None),
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
