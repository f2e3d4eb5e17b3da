"""JSON Schema subset: schemas that a grammar compiler could fail on are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.engines.openvino.guides import check
from cog_triton.errors import InvalidArgument
from cog_triton.text.guide import Guide
from cog_triton.text.tool_schema import OBJECT


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
        ({"type": []}, ["schema.type=[]"]),
        ({"type": {"a": 1}}, ["schema.type="]),
        ({"pattern": "("}, ["schema.pattern: not supported"]),
        ({"minLength": 3}, ["schema.minLength"]),
        ({"allOf": []}, ["schema.allOf: not supported", "'anyOf'"]),
        ({"propertys": {}}, ["'properties'"]),
        ({"properties": []}, ["schema.properties"]),
        ({"properties": {"a": False}}, ["schema.properties.a", "must be a schema"]),
        ({"properties": {'q"': True}}, ["1 to 64 characters"]),
        ({"properties": {"": True}}, ["1 to 64 characters"]),
        ({"properties": {"x" * 65: True}}, ["1 to 64 characters"]),
        ({"properties": {"a": {"type": "x"}}}, ["schema.properties.a.type"]),
        ({"$ref": "#/$defs/a/b", "$defs": {"a/b": {}}}, ["schema.$ref", "without '/'"]),
        ({"required": ["a"]}, ["schema.required"]),
        ({"required": "a"}, ["schema.required"]),
        ({"required": [["a"]]}, ["schema.required"]),
        ({"enum": ["\ud83e"]}, ["schema: not JSON", "surrogates"]),
        ({"enum": []}, ["schema.enum"]),
        ({"enum": [{}]}, ["schema.enum"]),
        ({"enum": "a"}, ["schema.enum"]),
        ({"const": []}, ["schema.const"]),
        ({"anyOf": []}, ["schema.anyOf"]),
        ({"anyOf": {"a": 1}}, ["schema.anyOf"]),
        ({"anyOf": [3]}, ["schema.anyOf[0]"]),
        ({"items": False}, ["schema.items"]),
        ({"minItems": 65}, ["schema.m", "Items=", "0 to 64"]),
        ({"type": "array", "minItems": 1}, ["schema.minItems=1: needs items"]),
        ({"maxItems": "1"}, ["schema.m", "Items=", "0 to 64"]),
        ({"minItems": True}, ["schema.m", "Items=", "0 to 64"]),
        ({"minItems": 3, "maxItems": 2, "items": {}}, ["schema.minItems=3", "maxItems=2"]),
        ({"additionalProperties": "no"}, ["schema.additionalProperties"]),
        ({"$ref": "#"}, ["schema.$ref='#'", "$defs"]),
        ({"$ref": "#/$defs/A"}, ["schema.$ref"]),
        ({"$ref": ["#/$defs/A"], "$defs": {"A": True}}, ["schema.$ref"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, ["refers to itself"]),
        ({"$defs": {"A": {"anyOf": [True, {"$ref": "#/$defs/A"}]}}}, ["refers to itself"]),
        (
            {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
            ["refers to itself"],
        ),
        ({"$defs": []}, ["schema.$defs"]),
        ({"items": {"$defs": {}}}, ["schema.items.$defs"]),
        ([], ["must be a JSON object"]),
        (True, ["must be a JSON object"]),
    ],
)
def test_unsupported_schemas_are_refused_with_place_and_rule(schema: Any, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_schema(schema)
    for word in ["E1005", *words]:
        assert word in str(caught.value)


def test_texts_that_are_no_schema_are_refused() -> None:
    deep: Any = True
    for _ in range(40):
        deep = {"items": deep}
    for text, word in [
        ("{", "not JSON"),
        ("[" * 60000, "nested deeper"),
        (json.dumps(deep), "deeper"),
        (json.dumps({"description": "x" * 70000}), "characters"),
    ]:
        with pytest.raises(InvalidArgument, match=word):
            check_text(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["object", "#/$defs/a", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*PERSON, "anyOf", "items", "$ref", "a"]), inner)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_accepted_or_refused_with_e1005(value: Any) -> None:
    try:
        check_schema(value)
    except InvalidArgument:
        return
    assert isinstance(value, dict)


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


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {f"p{n}": True for n in range(201)}}, "squares of numbers of optional"),
        (
            {"anyOf": [{"items": {}, "maxItems": 64}] * 33},
            "2048 items of bounded arrays",
        ),
        ({"anyOf": [{"type": ["string", "null"]}] * 1024}, "2048 schemas"),
        ({"enum": ["a" * n for n in range(257)]}, "32768 characters of enums"),
    ],
)
def test_what_compiles_too_long_is_refused(schema: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"schema: takes too long to compile.*{words}"):
        check_schema(schema)
