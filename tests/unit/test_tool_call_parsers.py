"""Parsers of tool calls: every case, any text and any arguments, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_call_cases import CASES, KINDS, TOOLS, Expected

from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import (
    Answer,
    Call,
    CallArguments,
    CallParser,
    CallStart,
    Delta,
    HermesParser,
    Llama3JsonParser,
    NamedCallParser,
    RequiredCallsParser,
    join,
)


def parse(kind: str, pieces: Iterable[str], tools: Collection[str] = TOOLS) -> list[Delta]:
    parser = KINDS[kind](tools)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def calls(answer: Answer) -> Expected:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize(("kind", "text", "expected", "content"), CASES)
def test_an_answer_however_it_is_cut(
    kind: str, text: str, expected: Expected, content: str
) -> None:
    whole = join(parse(kind, [text]))
    assert calls(whole) == expected
    assert whole.content == (content if content or expected else text)
    assert join(parse(kind, text)) == whole
    for place in range(len(text)):
        assert join(parse(kind, [text[:place], text[place:]])) == whole


@pytest.mark.parametrize(("kind", "text", "expected", "content"), CASES)
def test_half_an_answer_has_whole_calls_or_is_text(
    kind: str, text: str, expected: Expected, content: str
) -> None:
    for end in range(len(text)):
        parser = AnswerParser(None, KINDS[kind](TOOLS))
        answer = join([*parser.feed(text[:end]), *parser.finish()])
        if expected:  # else what follows a call denies it
            assert calls(answer) == expected[: len(answer.calls)]
        assert parser.called == bool(answer.calls)
        assert answer.calls or answer.content == text[:end]


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("parser", "text", "expected", "reason"),
    [
        (
            HermesParser,
            f"Hi {CALL[:-9]}",
            Answer("Hi ", calls=[Call("f", '{"a": 1}')]),
            "tool_calls",
        ),
        (HermesParser, f"{CALL}\n", Answer(calls=[Call("f", '{"a": 1}')]), "tool_calls"),
        (
            HermesParser,
            f"{CALL}\n{CALL[:20]}",
            Answer(f"\n{CALL[:20]}", calls=[Call("f", '{"a": 1}')]),
            "length",
        ),
        (HermesParser, CALL[:-13], Answer(CALL[:-13]), "length"),
        (NamedCallParser, '\n{"a": 1}\n', Answer(calls=[Call("f", '{"a": 1}')]), "stop"),
        (NamedCallParser, '{"a": 1', Answer('{"a": 1'), "length"),
        (NamedCallParser, "no", Answer("no"), "length"),
        (RequiredCallsParser, f"[{CALL[11:-12]}, {{", Answer(f"[{CALL[11:-12]}, {{"), "length"),
    ],
)
def test_an_answer_that_is_cut(
    parser: type[CallParser], text: str, expected: Answer, reason: str
) -> None:
    for pieces in ([text], list(text)):
        made = AnswerParser(None, parser(["f"]), forced=parser is NamedCallParser)
        deltas = [delta for piece in pieces for delta in made.feed(piece)]
        assert join([*deltas, *made.finish()]) == expected
        assert made.finish_reason("length") == reason


def test_a_call_is_reported_when_its_json_is_complete() -> None:
    parser = HermesParser(TOOLS)
    assert parser.feed(CALL[:-13]) == []
    assert parser.feed("}") == [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
    assert parser.feed("</tool_call>") == []
    json_answer = '{"capital": "P'
    assert join(Llama3JsonParser(TOOLS).feed(json_answer)).content == json_answer
    assert join(parser.feed(f"{CALL[:40]}{'x' * (1 << 20)}")).content.startswith(CALL[:40])


PIECES = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
            *('{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {"s": "'),
            *(
                '"name"',
                '"arguments"',
                '"f"',
                '"rm"',
            ),
            *(":", ",", ";", "{", "}", "[", "]", ")", "g{", '"', "\\", "\\u00", "fc", "\x00"),
            *("\\ud83e", "12", "-", "true", "null", "1e5", " ", "\n", "text", "ü", "🦙"),
        ]
    ),
    max_size=14,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", '"}}', "[TOOL_CALLS]", "\\", "\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(KINDS)), PIECES, st.data())
def test_any_text_however_it_is_cut(kind: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    whole = join(parse(kind, [text]))
    assert join(parse(kind, pieces)) == whole
    assert join(parse(kind, text)) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    cuts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert join(parse(kind, cuts)) == whole
    assert all(type(arguments) is dict for _, arguments in calls(whole))
    if not whole.calls:
        assert whole.content == text


@given(
    st.sampled_from(["hermes", "llama3_json", "mistral", "required"]),
    st.lists(
        st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=4), JSON)), max_size=3
    ),
    st.booleans(),
    st.text(alphabet="ab{ \n<[ü", max_size=8),
)
def test_calls_with_any_arguments_come_back(
    kind: str, made: Expected, ascii_only: bool, before: str
) -> None:
    objects = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
        for name, arguments in made
    ]
    if kind == "hermes":
        text = before + "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in objects)
    elif kind == "llama3_json":
        before = before.replace("{", "")
        text = before + "; ".join(objects)
    elif kind == "mistral":
        text = before + (f"[TOOL_CALLS] [{', '.join(objects)}]" if objects else "")
    else:
        text, before = (f"[{', '.join(objects)}]" if objects else ""), ""
    answer = join(parse(kind, text))
    assert answer.calls == [
        Call(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in made
    ]
    assert answer.content == (before if before.strip() or not made else "")
