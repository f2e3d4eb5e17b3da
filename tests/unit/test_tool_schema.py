"""JSON schemas of guides: what a grammar compiler takes, and guides of tools."""

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
from cog_triton.text.tool_schema import (
    OBJECT,
    ToolFunction,
    arguments_guide,
    calls_guide,
    calls_tag,
)


def check_text(text: str) -> None:
    check(Guide("json_schema", text), "schema")


def check_schema(schema: Any) -> None:
    check_text(json.dumps(schema))


PERSON: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "description": "Someone",
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"], "default": None},
        "kind": {"enum": ["a", 1, None, True]},
        "friends": {
            "type": "array",
            "minItems": 1,
            "maxItems": 64,
            "items": {"$ref": "#/$defs/Friend"},
        },
        "pet": {"anyOf": [{"const": "dog"}, {"$ref": "#/$defs/Friend"}, True]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "Friend": {
            "type": "object",
            "properties": {"of": {"$ref": "#/$defs/Friend"}, "größe in cm": {"type": "number"}},
            "additionalProperties": {"type": "string"},
        }
    },
}


@pytest.mark.parametrize("schema", [PERSON, {}, {"type": "object"}, json.loads(OBJECT)])
def test_schemas_of_structured_outputs_are_accepted(schema: dict[str, Any]) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "foo"}, ["schema.type=foo", "string"]),
        ({"pattern": "("}, ["schema.pattern: not supported"]),
        ({"allOf": []}, ["schema.allOf: not supported", "'anyOf'"]),
        ({"propertys": {}}, ["'properties'"]),
        ({"properties": {"a": False}}, ["schema.properties.a", "must be a schema"]),
        ({"properties": {'q"': True}}, ["1 to 64 characters"]),
        ({"properties": {"x" * 65: True}}, ["1 to 64 characters"]),
        ({"properties": {"a": {"type": "x"}}}, ["schema.properties.a.type"]),
        ({"$ref": "#/$defs/a/b", "$defs": {"a/b": {}}}, ["schema.$ref", "without '/'"]),
        ({"required": ["a"]}, ["schema.required"]),
        ({"enum": ["\ud83e"]}, ["schema: not JSON", "surrogates"]),
        ({"enum": []}, ["schema.enum"]),
        ({"const": []}, ["schema.const"]),
        ({"anyOf": [3]}, ["schema.anyOf[0]"]),
        ({"minItems": 65}, ["schema.m", "Items=", "0 to 64"]),
        ({"type": "array", "minItems": 1}, ["schema.minItems=1: needs items"]),
        ({"minItems": True}, ["schema.m", "Items=", "0 to 64"]),
        ({"minItems": 3, "maxItems": 2, "items": {}}, ["schema.minItems=3", "maxItems=2"]),
        ({"additionalProperties": "no"}, ["schema.additionalProperties"]),
        ({"$ref": "#/$defs/A"}, ["schema.$ref"]),
        ({"$ref": ["#/$defs/A"], "$defs": {"A": True}}, ["schema.$ref"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, ["refers to itself"]),
        ({"$defs": {"A": {"anyOf": [True, {"$ref": "#/$defs/A"}]}}}, ["refers to itself"]),
        (
            {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
            ["refers to itself"],
        ),
        ({"items": {"$defs": {}}}, ["schema.items.$defs"]),
        ([], ["must be a JSON object"]),
    ],
)
def test_unsupported_schemas_are_refused_with_place_and_rule(schema: Any, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_schema(schema)
    for word in ["E1005", *words]:
        assert word in str(caught.value)


def fan(width: int, depth: int, *, last: object = True) -> str:
    """Definitions that each are one of `width` references to the next."""
    definitions: dict[str, object] = {
        f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * width}
        for place in range(depth)
    }
    definitions[f"d{depth}"] = last
    return json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"})


def test_each_definition_is_visited_once() -> None:
    """Else 10 references, 20 deep, would take for ever."""
    check_text(fan(10, 20))
    with pytest.raises(InvalidArgument, match="refers to itself"):
        check_text(fan(10, 20, last={"anyOf": [{"$ref": "#/$defs/d0"}]}))
    with pytest.raises(InvalidArgument, match="behind more than 24 references"):
        check_text(fan(1, 100))


def function(parameters: dict[str, Any], *, name: str = "f", strict: bool = False) -> ToolFunction:
    return ToolFunction(f"tools.{name}", name, parameters, strict)


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


@pytest.mark.parametrize(("parallel", "most"), [(True, None), (False, 1)])
def test_there_is_one_call_unless_calls_are_parallel(parallel: bool, most: int | None) -> None:
    guide = json.loads(calls_guide([function({})], "arguments", parallel=parallel))
    assert guide.get("maxItems") == most


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
        changed(["format", "at_least_one"], True),
        changed(["format", "triggers"], []),
        changed(["format", "triggers"], [""]),
        changed(["format", "triggers"], ["<tool_call>", "{"]),
        changed(["format", "tags"], []),
        changed(["format", "tags"], TAG["format"]["tags"] * 65),
        changed(["format", "tags", 0, "begin"], "f("),
        changed(["format", "tags", 0, "begin"], "<tool_call>" + "x" * 512),
        changed(["format", "tags", 0, "end"], ""),
        changed(["format", "tags", 0, "content", "type"], "regex"),
        changed(["format", "tags", 0, "content", "json_schema"], {"pattern": "a"}),
    ],
)
def test_others_are_refused_before_an_engine_compiles_them(text: str) -> None:
    with pytest.raises(InvalidArgument, match="here"):
        check(Guide("structural_tag", text), "here")
