"""Reasoning before an answer, with vLLM's cases, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.serving.openai.parsers.answer_parser import AnswerParser, ReasoningParser
from cog_triton.serving.openai.parsers.deltas import Answer, Call, join
from cog_triton.serving.openai.parsers.formats import HermesParser


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
