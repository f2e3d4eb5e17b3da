"""Guides of answers that call tools: schemas, strict or not, and structural tags."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.engines.openvino.guides import check
from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.parsers.call_parser import HermesParser
from cog_triton.text.guide import Guide
from cog_triton.text.tool_schema import ToolFunction, arguments_guide, calls_guide, calls_tag


def function(parameters: dict[str, Any], *, name: str = "f", strict: bool = False) -> ToolFunction:
    return ToolFunction(f"tools.{name}", name, parameters, strict)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"of": {"$ref": "#/$defs/Person"}, "age": {"type": "integer"}},
    "required": ["age"],
}


def test_definitions_of_tools_do_not_meet() -> None:
    first = {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}}
    second = {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "null"}}}
    answer = {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "number"}}}
    guide = json.loads(
        calls_guide(
            [function(first), function(second, name="g", strict=True)],
            "arguments",
            parallel=True,
            or_else=answer,
        )
    )
    assert guide["$defs"] == {
        "0.X": {"type": "string"},
        "1.X": {"type": "null"},
        "X": {"type": "number"},
    }
    calls, other = guide["anyOf"]
    kinds = [kind["properties"]["arguments"]["properties"] for kind in calls["items"]["anyOf"]]
    assert kinds == [{"a": {"$ref": "#/$defs/0.X"}}, {"a": {"$ref": "#/$defs/1.X"}}]
    assert other == {"properties": {"a": {"$ref": "#/$defs/X"}}}


UNSUPPORTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date", "pattern": "^.", "minLength": 1},
        "size": {"oneOf": [{"type": "integer", "minimum": 1}, {"enum": [{"a": 1}]}]},
        "other": {"$ref": "#/definitions/Y"},
        "never": False,
        "some": {"type": "array", "minItems": 2},
        "few": {"minItems": 2},
        "many": {"type": "array", "minItems": 99999, "maxItems": 3, "items": {"not": {}}},
    },
    "required": ["day", "missing"],
}


def test_what_is_not_supported_is_left_out() -> None:
    assert json.loads(arguments_guide(function(UNSUPPORTED))) == {
        "type": "object",
        "properties": {
            "day": {"type": "string"},
            "size": {"anyOf": [{"type": "integer"}, {}]},
            "other": {},
            "never": {},
            "some": {"type": "array", "minItems": 2, "items": {}},
            "few": {},
            "many": {"type": "array", "maxItems": 3, "items": {}},
        },
        "required": ["day"],
    }


@pytest.mark.parametrize(
    "free",
    [
        {"properties": {'odd"name': {}}, "required": ['odd"name'], "additionalProperties": False},
        {"properties": {"x" * 65: {}, "b": {}}, "required": ["b"]},
        {"patternProperties": {"^x-": {}}, "additionalProperties": False},
        {"patternProperties": {"^x-": {}}, "additionalProperties": {"type": "string"}},
    ],
)
def test_an_object_with_names_that_no_grammar_has_is_free(free: dict[str, Any]) -> None:
    assert json.loads(arguments_guide(function(free))) == {"type": "object"}
    schema = {"properties": {"$top": free, "filter[a/b]": {}}, "required": ["$top"]}
    guide = json.loads(arguments_guide(function(schema | {"additionalProperties": False})))
    assert guide["properties"] == {"$top": {"type": "object"}, "filter[a/b]": {}}
    assert (guide["required"], guide["additionalProperties"]) == (["$top"], False)


def test_a_strict_schema_is_as_it_is() -> None:
    day = {"properties": {"day": {"format": "date"}}, "pattern": "a"}
    assert json.loads(arguments_guide(function(day, strict=True))) == {"type": "object", **day}


WORDS = st.sampled_from(
    ["type", "properties", "anyOf", "items", "$ref", "$defs", "minItems", "const", "a", "required"]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS | st.sampled_from(["#/$defs/a", "object"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(WORDS, ANY, max_size=5))
def test_any_schema_gives_a_supported_one_or_is_refused(parameters: dict[str, Any]) -> None:
    for guided in (
        lambda: arguments_guide(function(parameters)),
        lambda: calls_guide([function(parameters)], "arguments", parallel=True),
    ):
        with suppress(InvalidArgument):
            check(Guide("json_schema", guided()), "guide")


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORM = HermesParser.form
assert FORM is not None
FUNCTIONS = [
    ToolFunction("tools[0]", "f", SCHEMA, strict=True),
    ToolFunction("tools[1]", "gü", {"pattern": "a"}, strict=False),
]


def test_strict_functions_have_their_schema_and_others_any_object() -> None:
    text = calls_tag(FUNCTIONS, FORM)
    check(Guide("structural_tag", text), "here")
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
        check(Guide("structural_tag", text), "here")
