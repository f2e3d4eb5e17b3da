"""Structural tags: strict functions bind their arguments; only known forms reach an engine."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.parsers.formats import HermesParser
from cog_triton.text.guide import Guide
from cog_triton.text.structural_tag import calls_tag
from cog_triton.text.tool_schema import ToolFunction

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORM = HermesParser.form
assert FORM is not None
FUNCTIONS = [
    ToolFunction("tools[0]", "f", SCHEMA, strict=True),
    ToolFunction("tools[1]", "gü", {"pattern": "a"}, strict=False),
]


def test_strict_functions_have_their_schema_and_others_any_object() -> None:
    text = calls_tag(FUNCTIONS, FORM)
    Guide("structural_tag", text).check("here")
    form = json.loads(text)["format"]
    assert form["triggers"] == ["<tool_call>"]
    strict, free = form["tags"]
    assert strict["begin"] == '<tool_call>\n{"name": "f", "arguments": '
    assert strict["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert free["begin"] == '<tool_call>\n{"name": "g\\u00fc", "arguments": '
    assert free["content"]["json_schema"] == {"type": "object"}
    assert {strict["end"], free["end"]} == {"}\n</tool_call>"}


def test_what_it_binds_is_what_the_parser_reads() -> None:
    (tag, _) = json.loads(calls_tag(FUNCTIONS, FORM))["format"]["tags"]
    parser = HermesParser(["f"])
    deltas = parser.feed(f'{tag["begin"]}{{"a": "x"}}{tag["end"]}')
    assert [type(item).__name__ for item in deltas] == ["CallStart", "CallArguments"]
    assert (parser.completed, parser.finish()) == (1, [])


def test_a_strict_schema_that_is_not_supported_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"tools\[0\].pattern: not supported"):
        calls_tag([ToolFunction("tools[0]", "f", {"pattern": "a"}, strict=True)], FORM)


TAG: Any = json.loads(calls_tag(FUNCTIONS, FORM))


def changed(path: list[Any], value: Any) -> str:
    found = copy.deepcopy(TAG)
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "1", "{}", '{"type": "structural_tag"}', "[" * 9999, " " * 200_000),
        changed(["type"], "other"),
        changed(["other"], 1),
        changed(["format"], {"type": "any_text"}),
        changed(["format", "at_least_one"], True),
        changed(["format", "triggers"], []),
        changed(["format", "triggers"], [""]),
        changed(["format", "triggers"], [1]),
        changed(["format", "triggers"], ["<tool_call>", "{"]),
        changed(["format", "tags"], []),
        changed(["format", "tags"], [{}]),
        changed(["format", "tags"], TAG["format"]["tags"] * 65),
        changed(["format", "tags", 0, "begin"], "f("),
        changed(["format", "tags", 0, "begin"], 1),
        changed(["format", "tags", 0, "begin"], "<tool_call>" + "x" * 512),
        changed(["format", "tags", 0, "end"], ""),
        changed(["format", "tags", 0, "end"], ["x"]),
        changed(["format", "tags", 0, "content", "type"], "regex"),
        changed(["format", "tags", 0, "content", "json_schema"], {"pattern": "a"}),
        changed(["format", "tags", 0, "content", "json_schema"], "{}"),
    ],
)
def test_others_are_refused_before_an_engine_compiles_them(text: str) -> None:
    with pytest.raises(InvalidArgument, match="here"):
        Guide("structural_tag", text).check("here")
