"""Parsers of tool calls: every case, any text and any arguments, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_cases import call as message_with_call
from tool_call_cases import BROKEN, CASES, KINDS, TOOLS, Expected

from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import (
    Answer,
    CallArguments,
    CallParser,
    CallStart,
    Delta,
    join,
)
from cog_triton.serving.openai.parsers.formats import (
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    NamedCallParser,
    PythonicParser,
    RequiredCallsParser,
)
from cog_triton.text import chat


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", BROKEN)
def test_broken_arguments_are_never_whole(kind: str, text: str) -> None:
    for call in join(parse(kind, text)).calls:
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)


@pytest.mark.parametrize(("kind", "text", "expected", "content"), CASES)
def test_half_an_answer_has_no_wrong_call(
    kind: str, text: str, expected: Expected, content: str
) -> None:
    for end in range(len(text)):
        parser = AnswerParser(None, KINDS[kind](TOOLS))
        answer = join([*parser.feed(text[:end]), *parser.finish()])
        whole = []
        for place, call in enumerate(answer.calls):
            assert call.name == expected[place][0]
            try:
                whole.append(json.loads(call.arguments))
            except ValueError:
                assert place == len(answer.calls) - 1
        assert whole == [arguments for _, arguments in expected[: len(whole)]]
        assert parser.called == bool(whole)


def test_a_call_is_told_before_it_ends() -> None:
    parser = HermesParser(TOOLS)
    assert parser.feed('Hi <tool_call>{"name": "f"') != []
    assert parser.feed(', "arguments": {"a": "x') == [
        CallStart(0, "f"),
        CallArguments(0, '{"a": "x'),
    ]
    assert parser.feed("yz") == [CallArguments(0, "yz")]
    assert parser.feed('"}}') == [CallArguments(0, '"}')]
    assert parser.finish() == []


def test_named_call_is_the_text_itself() -> None:
    parser = NamedCallParser(["f"])
    deltas = [*parser.feed('\n{"a"'), *parser.feed(": 1"), *parser.feed("2}\n"), *parser.finish()]
    assert deltas[0] == CallStart(0, "f")
    assert calls(join(deltas)) == [("f", {"a": 12})]
    parser = NamedCallParser(["f"])
    assert join([*parser.feed("no"), *parser.finish()]) == Answer("no")


def test_calls_after_the_first_are_left_out_if_not_parallel() -> None:
    parser = AnswerParser(None, HermesParser(TOOLS), parallel=False)
    text = "".join(f'<tool_call>{{"name": "{n}", "arguments": {{}}}}</tool_call>' for n in "fg")
    assert calls(join([*parser.feed(text), *parser.finish()])) == [("f", {})]


PIECES = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
            *('{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {"s": "'),
            *('"name"', '"arguments"', '"f"', '"rm"', "[f(a=1)]", "[f(", "a='", "')]"),
            *(":", ",", ";", "{", "}", "[", "]", ")", "g{", '"', "\\", "\\u00", "fc"),
            *("\\ud83e", "12", "-", "true", "null", "1e5", " ", "\n", "text", "ü", "🦙"),
            *("<|tool_call_start|>", "<|python_end|>"),
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
    assert {call.name for call in whole.calls} <= {"f", "g"}
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
    assert calls(answer) == made
    assert answer.content == (before if before.strip() or not made else "")


@pytest.mark.parametrize("number", ["9" * 64, "-0." + "1" * 61, "[" * 62 + "]" * 62])
def test_a_call_that_the_server_made_can_be_sent_back(number: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
    (made,) = join(parse("hermes", [text])).calls
    assert json.loads(made.arguments) == {"a": json.loads(number)}
    chat.parse_messages(message_with_call(made.arguments))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (RequiredCallsParser, '[{"name": "f", "arguments": {}}, {"na'),
        (RequiredCallsParser, '[{"name'),
        (RequiredCallsParser, "["),
        (HermesParser, 'Hi<tool_call>\n{"name": "'),
        (MistralParser, "Hi[TOOL_CALLS] ["),
        (MistralParser, "Hi[TOOL_CALLS]f[AR"),
        (PythonicParser, "[f(a="),
    ],
)
def test_a_call_that_is_cut_before_it_is_one_leaks_no_format(
    kind: type[CallParser], text: str
) -> None:
    for fed in ([text], list(text)):
        parser = AnswerParser(None, kind(TOOLS))
        deltas = [delta for piece in fed for delta in parser.feed(piece)]
        answer = join([*deltas, *parser.finish(cut=True)])
        assert answer.content == ("Hi" if text.startswith("Hi") else "")
        assert len(answer.calls) == text.count("}}")


def test_text_that_is_cut_stays_text() -> None:
    for kind in (HermesParser, MistralParser, PythonicParser, Llama3JsonParser):
        parser = kind(TOOLS)
        assert join([*parser.feed("a [f] {1"), *parser.finish(cut=True)]).content == "a [f] {1"
