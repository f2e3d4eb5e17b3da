"""JSON Schema subset for constrained decoding: OpenAI's structured outputs.

The engine compiles a grammar from it. A schema that its compiler cannot take must not get there:
in OpenVINO 2026.4 one such schema ends the whole pipeline, and all requests with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from cog_triton.errors import InvalidArgument, nearest

OBJECT: Final = '{"type":"object"}'
"""Any JSON object: OpenAI's ``json_object``."""
TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"]
_ANNOTATIONS = ("$schema", "title", "description", "default", "examples")
KEYWORDS = (
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
)
_MAX_LENGTH = 64 * 1024
_MAX_DEPTH = 24
# The grammar has a rule for each of these.
MAX_ITEMS = 64
NAME = re.compile(r"[\w .-]{1,64}")
DEFINITIONS = "#/$defs/"


def parse_schema(text: str, where: str) -> dict[str, Any]:
    """Parse and validate a schema; raises E1005 naming the place in it, after `where`."""
    if len(text) > _MAX_LENGTH:
        raise InvalidArgument(f"{where}: has {len(text)} characters; {_MAX_LENGTH} at most")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not JSON: {str(error)[:100]}") from None
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{where}: must be a JSON object")
    _Check(schema, where).run()
    return schema


class _Check:
    def __init__(self, root: dict[str, Any], where: str) -> None:
        self._where = where
        self._root = root
        self._definitions = root.get("$defs", {})
        self._seen: set[str] = set()

    def run(self) -> None:
        if not isinstance(self._definitions, dict):
            raise InvalidArgument(f"{self._where}.$defs: must be an object")
        self._visit(self._where, self._root, 0, frozenset())
        for name, definition in self._definitions.items():
            self._visit(f"{self._where}.$defs.{name}", definition, 1, frozenset({name}))

    def _visit(self, at: str, schema: Any, depth: int, through: frozenset[str]) -> None:
        """Validate `schema`; `through` are the definitions followed since the last value."""
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise InvalidArgument(f"{at[:200]}: must be a schema, which is an object or true")
        if depth > _MAX_DEPTH:
            raise InvalidArgument(f"{at[:200]}: nested deeper than {_MAX_DEPTH} levels")
        for name in schema:
            if name not in KEYWORDS and name not in _ANNOTATIONS:
                raise InvalidArgument(
                    f"{at[:200]}.{name[:80]}: not supported{nearest(name, list(KEYWORDS))}"
                )
        if "$defs" in schema and schema is not self._root:
            raise InvalidArgument(f"{at[:200]}.$defs: only allowed at the top")
        self._check_values(at, schema)
        for name, inner in schema.get("properties", {}).items():
            self._visit(f"{at}.properties.{name}", inner, depth + 1, frozenset())
        for name in ("items", "additionalProperties"):
            if name in schema and not (name == "additionalProperties" and schema[name] is False):
                self._visit(f"{at}.{name}", schema[name], depth + 1, frozenset())
        for place, inner in enumerate(schema.get("anyOf", [])):
            self._visit(f"{at}.anyOf[{place}]", inner, depth + 1, through)
        if "$ref" in schema:
            self._follow(at, schema["$ref"], depth, through)

    def _follow(self, at: str, reference: Any, depth: int, through: frozenset[str]) -> None:
        name = str(reference).removeprefix(DEFINITIONS)
        if reference != f"{DEFINITIONS}{name}" or name not in self._definitions:
            raise InvalidArgument(
                f"{at[:200]}.$ref={str(reference)[:80]!r}: must name one of $defs"
            )
        if name in through:
            raise InvalidArgument(f"{at[:200]}.$ref={str(reference)[:80]!r}: refers to itself")
        if not through and name in self._seen:
            return
        self._seen.add(name)
        self._visit(
            f"{self._where}.$defs.{name}", self._definitions[name], depth + 1, through | {name}
        )

    def _check_values(self, at: str, schema: Mapping[str, Any]) -> None:
        at = at[:200]
        kinds = schema.get("type", "object")
        listed = kinds if isinstance(kinds, list) else [kinds]
        if not listed or any(not isinstance(k, str) or k not in TYPES for k in listed):
            raise InvalidArgument(f"{at}.type={str(kinds)[:80]}: must be of {', '.join(TYPES)}")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise InvalidArgument(f"{at}.properties: must be an object")
        for name in properties:
            if not NAME.fullmatch(name):
                raise InvalidArgument(
                    f"{at}.properties: {name[:80]!r}: a name has 1 to 64 letters, digits, spaces,"
                    " and of _.-"
                )
        if not isinstance(required, list) or any(str(name) not in properties for name in required):
            raise InvalidArgument(f"{at}.required: must be a list of names of properties")
        if "enum" in schema and not are_scalars(schema["enum"]):
            raise InvalidArgument(f"{at}.enum: must be a list of texts, numbers, booleans or null")
        if "const" in schema and not are_scalars([schema["const"]]):
            raise InvalidArgument(f"{at}.const: must be a text, number, boolean or null")
        bounds = [schema.get("minItems", 0), schema.get("maxItems", MAX_ITEMS)]
        if any(type(bound) is not int or not 0 <= bound <= MAX_ITEMS for bound in bounds):
            raise InvalidArgument(f"{at}: minItems and maxItems must be from 0 to {MAX_ITEMS}")
        if bounds[0] and "items" not in schema:
            raise InvalidArgument(f"{at}.minItems={bounds[0]}: needs items")
        if bounds[0] > bounds[1]:
            raise InvalidArgument(
                f"{at}.minItems={bounds[0]}: must not exceed maxItems={bounds[1]}"
            )
        if "anyOf" in schema and not (isinstance(schema["anyOf"], list) and schema["anyOf"]):
            raise InvalidArgument(f"{at}.anyOf: must be a list of schemas, not empty")
        if not isinstance(schema.get("additionalProperties", True), bool | dict):
            raise InvalidArgument(f"{at}.additionalProperties: must be true, false or a schema")


def are_scalars(values: Any) -> bool:
    """Whether it is a list of plain values, and not empty."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(value is None or isinstance(value, str | int | float) for value in values)
    )
