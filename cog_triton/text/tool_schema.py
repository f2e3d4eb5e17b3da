"""Guides of answers that call tools: JSON Schemas, and structural tags for calls amid text.

A structural tag is free text until a call's opening, then its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cog_triton.errors import InvalidArgument
from cog_triton.text import client_json, json_schema
from cog_triton.text.json_schema import (
    DEFINITIONS,
    KEYWORDS,
    MAX_ITEMS,
    NAME,
    OBJECT,
    TYPES,
    SchemaCost,
    parse_schema,
)

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
    """Schema of the arguments of one call; raises E1005 for one that is strict and unsupported."""
    adapted = _Adapted(function, "")
    schema = {**adapted.schema}
    if adapted.definitions:
        schema["$defs"] = adapted.definitions
    return _checked(schema)


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
    return _checked(schema)


def _checked(schema: Schema) -> str:
    text = json.dumps(schema)
    json_schema.parse_schema(text, "tools")
    return text


class _Adapted:
    """Parameters of a function, with definitions of their own names.

    A strict function's are as they are, or refused. Of another's, what guided decoding does not
    support is left out, so that more than they allow may be generated, as without guidance. An
    object with a name that no grammar can have is any object.
    """

    def __init__(self, function: ToolFunction, prefix: str) -> None:
        parameters = function.parameters
        if function.strict:
            json_schema.parse_schema(json.dumps(parameters), function.where)
        found = parameters.get("$defs", {})
        self._prefix = prefix
        self._known: Mapping[str, Any] = found if isinstance(found, dict) else {}
        self.schema = {"type": "object", **self._adapt(parameters, 0)}
        self.definitions = {
            prefix + name: self._adapt(value, 1) for name, value in self._known.items()
        }

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
            case "enum", list() if json_schema.are_scalars(value):
                return value
            case "const", _ if json_schema.are_scalars([value]):
                return value
            case "anyOf", list() if value:
                return [self._adapt(inner, depth + 1) for inner in value]
            case "$ref", str():
                name = value.removeprefix(DEFINITIONS)
                known = value.startswith(DEFINITIONS) and name in self._known and "/" not in name
                return f"{DEFINITIONS}{self._prefix}{name}" if known else None
        return None


def _writable(schema: Schema) -> bool:
    """Whether a grammar can have each name that an object of the schema may have."""
    names = schema.get("properties", {})
    closed = schema.get("additionalProperties", True) is not True
    if closed and "patternProperties" in schema:
        return False
    return not isinstance(names, dict) or all(map(NAME.fullmatch, names))


_MAX_LENGTH = 128 << 10
_MAX_TAGS = 128
_MAX_MARK = 512


class CallForm(NamedTuple):
    """How a model writes a call: `trigger` tells it from text, and `opening` begins with that.

    The function's name, as JSON, is between `opening` and `middle`, the arguments before `closing`.
    """

    trigger: str
    opening: str
    middle: str
    closing: str


def calls_tag(functions: Sequence[ToolFunction], form: CallForm) -> str:
    """Guide of an answer that may call `functions`; raises E1005.

    The arguments of strict ones follow their schemas, those of others are any JSON object.
    """
    tags = [
        {
            "type": "tag",
            "begin": f"{form.opening}{json.dumps(function.name)}{form.middle}",
            "content": {"type": "json_schema", "json_schema": _arguments(function)},
            "end": form.closing,
        }
        for function in functions
    ]
    value = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}
    text = json.dumps({"type": "structural_tag", "format": value})
    check_structural_tag(text, "tools")
    return text


def check_structural_tag(text: str, where: str) -> None:
    """Raise E1005, after `where`, for what is not such a guide: others may not compile."""
    if len(text) > _MAX_LENGTH:
        raise InvalidArgument(f"{where}: has {len(text)} characters; {_MAX_LENGTH} at most")
    try:
        found = client_json.parse(text)
        form = found["format"]
        triggers, tags = form["triggers"], form["tags"]
        rest = [found.keys() ^ {"type", "format"}, form.keys() ^ {"type", "triggers", "tags"}]
        (trigger,) = triggers
        known = [found["type"], form["type"]] == ["structural_tag", "triggered_tags"]
        if not known or any(rest) or not trigger or not 0 < len(tags) <= _MAX_TAGS:
            raise InvalidArgument(f"{where}: must be a structural tag of one trigger")
        cost = SchemaCost()
        for place, tag in enumerate(tags):
            _check_tag(tag, trigger, f"{where}.format.tags[{place}]", cost)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {str(error)[:80]}"
        raise InvalidArgument(f"{where}: not a structural tag: {detail}") from None


def _check_tag(tag: Any, trigger: str, where: str, cost: SchemaCost) -> None:
    begin, end, content = tag["begin"], tag["end"], tag["content"]
    rest = [tag.keys() ^ {"type", "begin", "content", "end"}]
    rest.append(content.keys() ^ {"type", "json_schema"})
    if [tag["type"], content["type"]] != ["tag", "json_schema"] or any(rest):
        raise InvalidArgument(f"{where}: must be a tag whose content is a json_schema")
    marked = begin.startswith(trigger) and isinstance(end, str) and end
    if not marked or max(len(begin), len(end)) > _MAX_MARK:
        raise InvalidArgument(f"{where}: must begin with the trigger, and end with a text")
    parse_schema(json.dumps(content["json_schema"]), f"{where}.content.json_schema", cost)


def _arguments(function: ToolFunction) -> Any:
    if not function.strict:
        return json.loads(OBJECT)
    return parse_schema(json.dumps(function.parameters), function.where)
