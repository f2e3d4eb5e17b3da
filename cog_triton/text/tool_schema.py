"""Guides of answers that call tools: JSON Schemas, and structural tags for calls amid text.

A structural tag is free text until a call's opening, then its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

OBJECT: Final = '{"type":"object"}'
"""Any JSON object: OpenAI's ``json_object``."""
TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"]
KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("enum", "const", "anyOf", "$ref", "$defs"),
)
"""Keywords that every engine takes."""
MAX_ITEMS = 64
"""Items of an array that a schema may ask for: a grammar has a rule for each."""
NAME = re.compile(r'[^"\\\x00-\x1f]{1,64}')
"""Name of a property that every engine takes."""
DEFINITIONS = "#/$defs/"
Schema = dict[str, Any]
_OF_OBJECTS = ("properties", "required", "additionalProperties")
# A call has four levels of its own above its arguments.
_MAX_DEPTH = 16


class ToolFunction(NamedTuple):
    """A function that may be called; `where` names its parameters in errors."""

    where: str
    name: str
    parameters: Schema
    strict: bool


def arguments_guide(function: ToolFunction) -> str:
    """Schema of the arguments of one call."""
    adapted = _Adapted(function, "")
    schema = {**adapted.schema}
    if adapted.definitions:
        schema["$defs"] = adapted.definitions
    return json.dumps(schema)


def calls_guide(
    functions: Sequence[ToolFunction],
    arguments_key: str,
    *,
    parallel: bool,
    or_else: Schema | None = None,
) -> str:
    """Schema of a list of calls, of one call unless `parallel`; or of `or_else` instead.

    Each call has the function's name, and its arguments as `arguments_key`.
    """
    definitions: Schema = {}
    calls = []
    for place, function in enumerate(functions):
        adapted = _Adapted(function, f"{place}.")
        definitions |= adapted.definitions
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, arguments_key: adapted.schema},
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    schema: Schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    if or_else is not None:
        definitions |= or_else.get("$defs", {})
        other = {key: value for key, value in or_else.items() if key != "$defs"}
        schema = {"anyOf": [schema, other]}
    if definitions:
        schema["$defs"] = definitions
    return json.dumps(schema)


class _Adapted:
    """Parameters of a function, with definitions of their own names.

    A strict function's are as they are. Of another's, what not every engine takes is left out, so
    that more than they allow may be generated, as without guidance. An object with a name that no
    grammar can have is any object.
    """

    def __init__(self, function: ToolFunction, prefix: str) -> None:
        parameters = {key: value for key, value in function.parameters.items() if key != "$defs"}
        found = function.parameters.get("$defs", {})
        self._prefix = prefix
        self._known: Mapping[str, Any] = found if isinstance(found, dict) else {}
        adapt = self._renamed if function.strict else self._adapt
        self.schema = {"type": "object", **adapt(parameters, 0)}
        self.definitions = {prefix + name: adapt(value, 1) for name, value in self._known.items()}

    def _renamed(self, schema: Any, depth: int) -> Any:
        """The schema with references to the definitions by their new names."""
        if isinstance(schema, list):
            return [self._renamed(inner, depth + 1) for inner in schema]
        if not isinstance(schema, dict):
            return schema
        return {
            key: self._reference(value) or value
            if key == "$ref"
            else self._renamed(value, depth + 1)
            for key, value in schema.items()
        }

    def _reference(self, value: Any) -> str | None:
        name = str(value).removeprefix(DEFINITIONS)
        known = value == f"{DEFINITIONS}{name}" and name in self._known and "/" not in name
        return f"{DEFINITIONS}{self._prefix}{name}" if known else None

    def _adapt(self, schema: Any, depth: int) -> Schema:
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return {}
        kept = {key: schema[key] for key in KEYWORDS if key in schema and key != "$defs"}
        kept.setdefault("anyOf", schema.get("oneOf"))
        for key, value in list(kept.items()):
            if (new := self._keyword(key, value, depth)) is None:
                del kept[key]
            else:
                kept[key] = new
        if "array" in kept.get("type", ()):
            kept.setdefault("items", {})
        if "items" not in kept:
            kept.pop("minItems", None)
        if not _writable(schema):
            kept = {key: value for key, value in kept.items() if key not in _OF_OBJECTS}
            kept.setdefault("type", "object")
        if "required" in kept:
            known = kept.get("properties", {})
            kept["required"] = [name for name in kept["required"] if name in known]
        return kept

    def _keyword(self, key: str, value: Any, depth: int) -> Any:
        """The keyword's value, None for what is not supported."""
        match key, value:
            case "type", str() | list():
                listed = value if isinstance(value, list) else [value]
                return value if listed and all(kind in TYPES for kind in listed) else None
            case "properties", dict():
                return {name: self._adapt(inner, depth + 1) for name, inner in value.items()}
            case "required", list():
                return [name for name in value if isinstance(name, str)]
            case "additionalProperties", bool():
                return value
            case (("items" | "additionalProperties"), dict()):
                return self._adapt(value, depth + 1)
            case (("minItems" | "maxItems"), int()) if 0 <= value <= MAX_ITEMS:
                return value
            case "enum", list() if are_scalars(value):
                return value
            case "const", _ if are_scalars([value]):
                return value
            case "anyOf", list() if value:
                return [self._adapt(inner, depth + 1) for inner in value]
            case "$ref", str():
                return self._reference(value)
        return None


def _writable(schema: Schema) -> bool:
    """Whether a grammar can have each name that an object of the schema may have."""
    names = schema.get("properties", {})
    closed = schema.get("additionalProperties", True) is not True
    if closed and "patternProperties" in schema:
        return False
    return not isinstance(names, dict) or all(map(NAME.fullmatch, names))


def are_scalars(values: Any) -> bool:
    """Whether it is a list of plain values, and not empty."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(value is None or isinstance(value, str | int | float) for value in values)
    )


class CallForm(NamedTuple):
    """How a model writes a call: `trigger` tells it from text, and `opening` begins with that.

    The function's name, as JSON, is between `opening` and `middle`, the arguments before `closing`.
    """

    trigger: str
    opening: str
    middle: str
    closing: str


def calls_tag(functions: Sequence[ToolFunction], form: CallForm) -> str:
    """Guide of an answer that may call `functions`.

    The arguments of strict ones follow their schemas, those of others are any JSON object.
    """
    tags = [
        {
            "type": "tag",
            "begin": f"{form.opening}{json.dumps(function.name)}{form.middle}",
            "content": {
                "type": "json_schema",
                "json_schema": function.parameters if function.strict else json.loads(OBJECT),
            },
            "end": form.closing,
        }
        for function in functions
    ]
    value = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}
    return json.dumps({"type": "structural_tag", "format": value})
