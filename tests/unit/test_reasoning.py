"""Reasoning before an answer, and how the parsers of answers are chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML_TOOLS, LLAMA_3, MISTRAL, QWEN, SMOLLM2
from hypothesis import given
from hypothesis import strategies as st
from openai_server import TOKENIZER
from small_tokenizers import byte_level
from vllm_engines import double_environment

from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser, ReasoningParser
from cog_triton.serving.openai.parsers.borrowed import borrow
from cog_triton.serving.openai.parsers.call_parser import (
    Answer,
    Call,
    HermesParser,
    call_parser,
    join,
    reasoning_parser,
)
from cog_triton.settings import load_settings
from cog_triton.text.reasoning import ReasoningCount
from cog_triton.text.tokenizer import EngineTokenizer


@pytest.mark.parametrize(
    ("texts", "opened", "expected"),
    [
        (["<think>", "a", "</think>", "b"], False, 3),
        (["\n", "<", "thi", "nk>a</th", "ink>b", "c"], False, 5),
        (["a", "", "b</think>c", "d"], True, 3),
        (["<think>", "a", "</think>", "b"], True, 3),
        (["<think>", "a", "b"], False, 3),
        (["a", "<think>", "b", "</think>"], False, 0),
        (["<thin", "g>", "b"], False, 0),
    ],
)
def test_tokens_count_up_to_the_closing_marker(
    texts: list[str], opened: bool, expected: int
) -> None:
    count = ReasoningCount("<think>", "</think>", opened)
    for text in texts:
        if not count.ended:
            count.add(text)
    assert count.tokens == expected


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


def tokenizer_of(template: str | None, tools: str | None = None) -> EngineTokenizer:
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
    settings, known = load_settings(), tokenizer_of(template)
    assert (call_parser(settings, known), reasoning_parser(settings, known)) == (calls, reasoning)


@dataclass
class Family:
    tokenizer_dir: Path
    parses = True

    @property
    def model_dir(self) -> Path:
        return self.tokenizer_dir


UNKNOWN, PYTHONIC = "<arg_key>", "[func_name1(a=1)]"
BORROWED: list[tuple[dict[str, str], str, str, tuple[str, str] | None]] = [
    ({"tool_call_parser": "vllm:brackets"}, UNKNOWN, "qwen3", ("brackets", "")),
    ({"tool_call_parser": "vllm:glm45"}, UNKNOWN, "qwen3", ("glm45", "glm45")),
    (
        {"tool_call_parser": "vllm:auto", "reasoning_parser": "none"},
        UNKNOWN,
        "glm4_moe",
        ("glm45", ""),
    ),
    ({"reasoning_parser": "vllm:braces"}, UNKNOWN, "qwen3", ("", "braces")),
    ({}, UNKNOWN, "glm4_moe", ("glm45", "glm45")),
    ({}, UNKNOWN, "qwen3", None),
    ({}, PYTHONIC, "llama", ("pythonic", "")),
    ({}, PYTHONIC, "glm4_moe", ("glm45", "glm45")),
    ({"tool_call_parser": "none"}, UNKNOWN, "glm4_moe", None),
]


def tokenizer(mark: str) -> EngineTokenizer:
    return replace(TOKENIZER, chat_template="{{ tools }}" + mark)


@contextmanager
def served_model(directory: Path, model_type: str) -> Iterator[Any]:
    TOKENIZER.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in double_environment().items():
            patch.setenv(name, value)
        yield Family(directory)


@pytest.mark.parametrize(("options", "mark", "model_type", "expected"), BORROWED)
def test_settings_template_and_the_models_type_choose(
    tmp_path: Path,
    options: dict[str, str],
    mark: str,
    model_type: str,
    expected: tuple[str, str] | None,
) -> None:
    with served_model(tmp_path, model_type) as family:
        made = borrow(load_settings(**options), family, tokenizer(mark), tmp_path / "links")
    assert (made and (made.tool, made.reasoning)) == expected
    if made is not None:
        made.close()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"tool_call_parser": "vllm:auto"}, "has no parser by the model's type 'qwen3'; name one"),
        ({"tool_call_parser": "vllm:none_such"}, "has no tool call parser 'none_such'"),
        (
            {"tool_call_parser": "vllm:brackets", "reasoning_parser": "think"},
            "REASONING_PARSER=think: not beside TOOL_CALL_PARSER=vllm:brackets",
        ),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, options: dict[str, str], rule: str
) -> None:
    with (
        served_model(tmp_path, "qwen3") as family,
        pytest.raises(InvalidArgument, match=rule),
    ):
        borrow(load_settings(**options), family, tokenizer(UNKNOWN), tmp_path / "links")
