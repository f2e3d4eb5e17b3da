"""Parsers of tool calls: vLLM's cases, calls in odd places, and text however it is cut."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_cases import call as message_with_call

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
    CALL_PARSERS,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    NamedCallParser,
    PythonicParser,
    RequiredCallsParser,
)
from cog_triton.text import chat

TOOLS = (
    *("add", "sub", "get_weather", "get_age", "search", "final_answer", "get_db_config"),
    *("register_user", "multiply", "f", "g"),
)
KINDS: dict[str, type[CallParser]] = {**CALL_PARSERS, "required": RequiredCallsParser}
Expected = list[tuple[str, dict[str, Any]]]


def parse(kind: str, pieces: Iterable[str], tools: Collection[str] = TOOLS) -> list[Delta]:
    parser = KINDS[kind](tools)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def calls(answer: Answer) -> Expected:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def text_alone(text: str) -> tuple[str, Expected, str]:
    """A case that is no call."""
    return text, [], text


HERMES: list[tuple[str, Expected, str]] = [
    text_alone("This is not a tool call."),
    (
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}\n</tool_call>',
        [("final_answer", {"trigger": True})],
        "",
    ),
    (
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}',
        [("final_answer", {"trigger": True})],
        "",
    ),
    (
        'Sure, let me check the weather.<tool_call>{"name": "get_weather", "arguments":'
        ' {"city": "NYC"}}</tool_call>',
        [("get_weather", {"city": "NYC"})],
        "Sure, let me check the weather.",
    ),
    (
        '<tool_call>{"name": "search", "arguments": {"q": "cats"}}</tool_call>'
        '<tool_call>{"name": "search", "arguments": {"q": "dogs"}}</tool_call>',
        [("search", {"q": "cats"}), ("search", {"q": "dogs"})],
        "",
    ),
    (
        '<tool_call>{"name": "get_db_config", "arguments": "{\\"param\\": \\"max\\"}"}</tool_call>',
        [("get_db_config", {"param": "max"})],
        "",
    ),
    # vLLM gives a call with a string for arguments here.
    text_alone('<tool_call>{"name": "f", "arguments": "hello"}</tool_call>'),
    *(
        (f'<tool_call>{{"name": "f", "arguments": {json.dumps(text)}}}</tool_call>', [], "")
        for text in ("{hello world}", "[oops", '{"a": 1} tail text', "[1]")
    ),
    # vLLM gives text here when it does not stream, a call when it does.
    (
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}',
        [("final_answer", {"trigger": True})],
        "",
    ),
    # A tool that was not offered is no tool.
    text_alone('<tool_call>{"name": "rm", "arguments": {}}</tool_call> Done.'),
    (
        '\n<tool_call>\n {"arguments": {"a": "</tool_call>{<tool_call>"}, "name": "f"}'
        "\n</tool_call>\n\nAnd: <tool_call>"
        '{"name": "g", "arguments": {"u": "\\u00fc\\"}"}}</tool_call>\n',
        [("f", {"a": "</tool_call>{<tool_call>"}), ("g", {"u": 'ü"}'})],
        "\n\nAnd: ",
    ),
    text_alone("<tool_call>\nlet me think</tool_call>"),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        [],
        "",
    ),
]
BROKEN = [HERMES.pop()[0]]
"""What breaks within arguments that have begun."""

LLAMA: list[tuple[str, Expected, str]] = [
    text_alone("This is just some text without any tool calls"),
    (
        'Here is the result: {"name": "f", "parameters": {}} Would you like to know more?',
        [("f", {})],
        "Here is the result: Would you like to know more?",
    ),
    (
        '{"name": "search", "parameters": {"query": "test query", "limit": 10}}',
        [("search", {"query": "test query", "limit": 10})],
        "",
    ),
    ('{"name": "search", "arguments": {"query": "test"}}', [("search", {"query": "test"})], ""),
    (
        '<|python_tag|>{"type": "function", "name": "search", "parameters": {"query": "test"}}',
        [("search", {"query": "test"})],
        "",
    ),
    (
        '{"name": "search", "parameters": {"query": "test1"}}; {"name": "f", "parameters": {}} ;\n'
        '{"name": "g", "parameters": {"query": "test2"}}\n{"name": "f", "parameters": {}}',
        [("search", {"query": "test1"}), ("f", {}), ("g", {"query": "test2"}), ("f", {})],
        "",
    ),
    (
        '{"name": "f", "parameters": {"l1": {"l2": {"l3": {"l4": {"value": "deep"}}}}}}',
        [("f", {"l1": {"l2": {"l3": {"l4": {"value": "deep"}}}}})],
        "",
    ),
    (
        '{"name": "f", "parameters": {"query": "test {value} [complex]","nested": {"inner": "more'
        ' {brackets}"}}}',
        [("f", {"query": "test {value} [complex]", "nested": {"inner": "more {brackets}"}})],
        "",
    ),
    (
        '{"name": "f", "parameters": {"text": "He said \\"Hello {world}\\""}}',
        [("f", {"text": 'He said "Hello {world}"'})],
        "",
    ),
    text_alone('{"parameters": {}}'),
    text_alone('{"name": "f"}'),
    (
        '{"name": "f", "parameters": {"query": "test"}} I used {f} and {"query": "test"} for this.',
        [("f", {"query": "test"})],
        'I used {f} and {"query": "test"} for this.',
    ),
    text_alone('{"name": "Bob", "parameters": {}}'),
    text_alone("{hello world[A(A=\t)A(A=,\t"),
    text_alone('{"capital": "Paris"}'),
    text_alone('<|python_tag|>print("{}")'),
]

MISTRAL: list[tuple[str, Expected, str]] = [
    text_alone("This is a test"),
    (
        '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]',
        [("add", {"a": 3.5, "b": 4})],
        "",
    ),
    (
        '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}]',
        [("get_age", {"name": "John Doe"})],
        "",
    ),
    (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5, "b": 4}}, {"name": "get_weather",'
        ' "arguments":{"city": "San Francisco"}}]',
        [("add", {"a": 3.5, "b": 4}), ("get_weather", {"city": "San Francisco"})],
        "",
    ),
    ('Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 1}}]', [("add", {"a": 1})], "Hello"),
    # vLLM leaves out what follows a call.
    (
        '[TOOL_CALLS] [{"name": "add", "arguments":{"a": 1}}]\nextra trailing data',
        [("add", {"a": 1})],
        "\nextra trailing data",
    ),
    # vLLM raises.
    (
        '[TOOL_CALLS] [{"name": "add", "arguments":{"a": 1}}][TOOL_CALLS] [{"name": "sub",'
        ' "arguments":{"b": 2}}]',
        [("add", {"a": 1}), ("sub", {"b": 2})],
        "",
    ),
    # vLLM looks for JSON behind junk.
    text_alone('[TOOL_CALLS]  junk [{"name": "add", "arguments":{"a": 1}}] trail'),
    # vLLM leaves out the marker.
    text_alone("[TOOL_CALLS] not json at all"),
    ('[TOOL_CALLS]add{"a": 3.5, "b": 4}', [("add", {"a": 3.5, "b": 4})], ""),
    (
        '[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4}[TOOL_CALLS]multiply[CALL_ID]x1[ARGS]{"a": 3}',
        [("add", {"a": 3.5, "b": 4}), ("multiply", {"a": 3})],
        "",
    ),
    ('hi{hi[TOOL_CALLS]f{"a": "[TOOL_CALLS]g{}"}', [("f", {"a": "[TOOL_CALLS]g{}"})], "hi{hi"),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", {})], ""),
    ("[TOOL_CALLS]nothing[TOOL_CALLS]f{}", [("f", {})], "[TOOL_CALLS]nothing"),
    text_alone("[TOOL_CALLS]" + "x" * 300 + "{}"),
    text_alone("[TOOL_CALLS]rm[ARGS]{}"),
    text_alone("[TOOL_CALLS][]"),
    text_alone("[TOOL_CALLS]f"),
    (
        'hi{hi[TOOL_CALLS]f{"command": "print(\\"hello world!\\")\\nre.compile(r\'{}\')"}',
        [("f", {"command": "print(\"hello world!\")\nre.compile(r'{}')"})],
        "hi{hi",
    ),
]

WEATHER = "get_weather(city='San Francisco', metric='celsius')"
WEATHER_CALL = ("get_weather", {"city": "San Francisco", "metric": "celsius"})
USER = (
    "register_user(name='John Doe', age=37, address={'city': 'San Francisco', 'state': 'CA'},"
    " role=None, passed_test=True, aliases=['John', 'Johnny'])"
)
USER_CALL = (
    "register_user",
    {
        "name": "John Doe",
        "age": 37,
        "address": {"city": "San Francisco", "state": "CA"},
        "role": None,
        "passed_test": True,
        "aliases": ["John", "Johnny"],
    },
)
PYTHONIC: list[tuple[str, Expected, str]] = [
    text_alone("How can I help you today?"),
    (f"[{WEATHER}]", [WEATHER_CALL], ""),
    (f"[{USER}]", [USER_CALL], ""),
    ("[get_weather()]", [("get_weather", {})], ""),
    ("[f(additional_data={}, steps=[])]", [("f", {"additional_data": {}, "steps": []})], ""),
    (
        r"[get_weather(city='Martha\'s Vineyard', metric='\"cool units\"')]",
        [("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'})],
        "",
    ),
    (f"[{WEATHER}, {USER}]", [WEATHER_CALL, USER_CALL], ""),
    text_alone("hello world[A(A=\t)A(A=,\t"),
    # vLLM gives the calls that are whole; here all of a list are calls, or it is text.
    text_alone(f"[f(x=b'z'), {WEATHER}]"),
    text_alone(f"[f(x=1e999), {WEATHER}]"),
    text_alone(f"[{WEATHER}, f(a='x 'y', b='z')]"),
    text_alone("[f(a='x 'y' 'z), g(b='p 'q' 'r)]"),
    # vLLM gives nothing at all.
    text_alone("[f(x=1])]"),
    text_alone("[see](https://example.org)"),
    text_alone("[1, 2]"),
    text_alone("[rm(path='/')]"),
    text_alone("[f(1)]"),
    text_alone("[f(a=1, a=2)]"),
    (
        "Sure.<|tool_call_start|>[f(a=-1.5e3, b=(1, 2), c='\\u00fc\\x41\\n', d=\"]\")]"
        "<|tool_call_end|>ok",
        [("f", {"a": -1500.0, "b": [1, 2], "c": "üA\n", "d": "]"})],
        "Sure.ok",
    ),
    (
        " <|python_start|>[ f ( a = false ), g(b=null,), ]<|python_end|>",
        [("f", {"a": False}), ("g", {"b": None})],
        "",
    ),
]

REQUIRED: list[tuple[str, Expected, str]] = [
    ('[{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})], ""),
    (
        ' [ {"name": "f", "parameters": {"a": "}]"}} , {"name": "g", "arguments": {}} ]\n',
        [("f", {"a": "}]"}), ("g", {})],
        "",
    ),
    *(
        (json.dumps([{"name": "f", "parameters": {"city": city}}]), [("f", {"city": city})], "")
        for city in ("a { b", "a } b", "a }} b", 'a " } b', r"a \ } b")
    ),
    # vLLM leaves out what follows the list.
    ('[{"name": "f", "parameters": {}}]\nDONE', [("f", {})], "\nDONE"),
    text_alone('{"name": "f"}'),
    text_alone('[{"name": "f", "parameters": null}]'),
    text_alone("["),
    text_alone("[]"),
    text_alone(" ] no call"),
]

CASES = [
    pytest.param(kind, *case, id=f"{kind}-{number}")
    for kind, cases in zip(KINDS, (HERMES, LLAMA, MISTRAL, PYTHONIC, REQUIRED), strict=True)
    for number, case in enumerate(cases)
]


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
