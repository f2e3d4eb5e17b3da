"""Parsers of tool calls: every case, and any text, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import (
    CALL_PARSERS,
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

TOOLS = (
    *("add", "sub", "get_weather", "get_age", "search", "final_answer", "get_db_config"),
    *("register_user", "multiply", "f", "g"),
)
KINDS: dict[str, type[CallParser]] = {**CALL_PARSERS, "required": RequiredCallsParser}
Expected = list[tuple[str, dict[str, Any]]]


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
        'Sure, let me check the weather.<tool_call>{"name": "get_weather", "arguments":'
        ' {"city": "NYC"}}</tool_call>',
        [("get_weather", {"city": "NYC"})],
        "Sure, let me check the weather.",
    ),
    (
        '<tool_call>{"name": "get_db_config", "arguments": "{\\"param\\": \\"max\\"}"}</tool_call>',
        [("get_db_config", {"param": "max"})],
        "",
    ),
    text_alone('<tool_call>\n{"name": "f", "arguments": {"trigger": true}'),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call> Done.', [("rm", {})], " Done."),
    ('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}', [("f", {}), ("g", {})], ""),
    # vLLM finds no call; here it is reported when its JSON is complete.
    (
        '<tool_call>{"name": "f", "arguments": {}} Done. </tool_call>',
        [("f", {})],
        "Done. </tool_call>",
    ),
    (
        '\n<tool_call>\n {"arguments": {"a": "</tool_call>{<tool_call>"}, "name": "f"}'
        "\n</tool_call>\n\nAnd: <tool_call>"
        '{"name": "g", "arguments": {"u": "\\u00fc\\"}"}}</tool_call>\n',
        [("f", {"a": "</tool_call>{<tool_call>"}), ("g", {"u": 'ü"}'})],
        "\n\nAnd: ",
    ),
    text_alone("<tool_call>\nlet me think</tool_call>"),
    (
        '<tool_call>{"name": "f", "arguments": {}<tool_call>{"name": "g"}',
        [("g", {})],
        '<tool_call>{"name": "f", "arguments": {}',
    ),
]

LLAMA: list[tuple[str, Expected, str]] = [
    (
        'Here is the result: {"name": "f", "parameters": {}} Would you like to know more?',
        [("f", {})],
        "Here is the result: Would you like to know more?",
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
        '{"name": "f", "parameters": {"query": "test {value} [complex]","nested": {"inner": "more'
        ' {brackets}"}}}',
        [("f", {"query": "test {value} [complex]", "nested": {"inner": "more {brackets}"}})],
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
    text_alone('{"name": "f", "parameters": null}'),
    text_alone("{hello world[A(A=\t)A(A=,\t"),
    text_alone('{"capital": "Paris"}'),
    text_alone('<|python_tag|>print("{}")'),
]

MISTRAL: list[tuple[str, Expected, str]] = [
    text_alone("This is a test"),
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
        "extra trailing data",
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
    ("[TOOL_CALLS]rm[ARGS]{}", [("rm", {})], ""),
    ("[TOOL_CALLS]f[ARGS]{}}", [("f", {})], "}"),
    text_alone('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": 1}]'),
    text_alone("[TOOL_CALLS][]"),
    text_alone("[TOOL_CALLS]f"),
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
    ('[{"name": "f", "parameters": {}}]\nDONE', [("f", {})], "DONE"),
    text_alone('{"name": "f"}'),
    text_alone('[{"name": "f", "parameters": null}]'),
    text_alone("["),
    text_alone("[]"),
    text_alone(" ] no call"),
]

FORMS = {
    "hermes": "Hi <tool_call>\n%s\n</tool_call>",
    "llama3_json": "Hi <|python_tag|>%s",
    "mistral": "Hi [TOOL_CALLS] [%s]",
}
DEEP = f'{{"a": {"[" * 61}{"]" * 61}}}'
LENIENT: list[tuple[str, Expected]] = [
    ('{"name": "f", "arguments": {"a": "x\n\ty\\n\0"}}', [("f", {"a": "x\n\ty\n\0"})]),
    ('{"id": 1, "name": "f", "arguments": {"a": 1}, "reason": "x"}', [("f", {"a": 1})]),
    ('{"name": "f"}', [("f", {})]),
    ('{"name": "f", "arguments": null}', [("f", {})]),
    ('{"arguments": "", "name": "rm-2.x"}', [("rm-2.x", {})]),
    ('{"name": "f", "parameters": {"a": %s}}' % ("9" * 64), [("f", {"a": int("9" * 64)})]),
    (f'{{"name": "f", "parameters": {DEEP}}}', [("f", json.loads(DEEP))]),
]
BROKEN = [
    *('{"a": NaN}', '{"a": 1,}', r'{"a": "\'"}', '{"a": "b "c" d"}', '{"a": 1'),
    *('{"a": 01}', '{"a" 1}', "{a: 1}", '{"a": True}', '{"a": 1e999}', "[]", "0", "{} x"),
    *(r'{"a": "\ud83e"}', r'"{\"a\": \"\ud83e\"}"', '"hello"', '"[1]"', r'"{\"a\": 1} tail"'),
    *("[" * 65, '{"a": %s}' % ("9" * 99)),
]

CASES = [
    pytest.param(kind, *case, id=f"{kind}-{number}")
    for kind, cases in zip(KINDS, (HERMES, LLAMA, MISTRAL, REQUIRED), strict=True)
    for number, case in enumerate(
        [
            *cases,
            *((FORMS[kind] % call, made, "Hi ") for call, made in LENIENT if kind in FORMS),
            *(
                text_alone(FORMS[kind] % f'{{"name": "f", "arguments": {value}}}')
                for value in BROKEN
                if kind in FORMS
            ),
        ]
    )
]


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
