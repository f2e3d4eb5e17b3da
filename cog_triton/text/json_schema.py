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
from cog_triton.text import client_json

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
NAME = re.compile(r'[^"\\\x00-\x1f]{1,64}')
DEFINITIONS = "#/$defs/"


class SchemaCost:
    """Bounds on what xgrammar compiles: each alone takes it about two seconds at its limit.

    Of objects it is the squares of optional properties that count, of arrays the items that are
    written out, of enums the characters; measured with a vocabulary of 49152 tokens.
    """

    _LIMITS: Final = {
        "schemas": 2048,
        "squares of numbers of optional properties": 40_000,
        "items of bounded arrays": 2048,
        "characters of enums": 32 << 10,
    }

    def __init__(self) -> None:
        self._sums = dict.fromkeys(self._LIMITS, 0)

    def add(self, where: str, *costs: int) -> None:
        """Add costs, in the order of the limits; raises E1005, after `where`, beyond one."""
        for (name, most), cost in zip(self._LIMITS.items(), costs, strict=True):
            self._sums[name] += cost
            if self._sums[name] > most:
                raise InvalidArgument(
                    f"{where}: takes too long to compile: more than {most} {name}"
                )


def parse_schema(text: str, where: str, cost: SchemaCost | None = None) -> dict[str, Any]:
    """Parse and validate a schema; raises E1005 naming the place in it, after `where`.

    Several schemas of one guide share a `cost`.
    """
    if len(text) > _MAX_LENGTH:
        raise InvalidArgument(f"{where}: has {len(text)} characters; {_MAX_LENGTH} at most")
    try:
        schema = client_json.parse(text)
        json.dumps(schema, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except ValueError as error:
        raise InvalidArgument(f"{where}: not JSON: {str(error)[:100]}") from None
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{where}: must be a JSON object")
    _Check(schema, where, cost or SchemaCost()).run()
    return schema


class _Check:
    """Validation that visits each definition once, however many references lead to it."""

    def __init__(self, root: dict[str, Any], where: str, cost: SchemaCost) -> None:
        self._where = where
        self._cost = cost
        self._root = root
        self._definitions = root.get("$defs", {})
        self._through: dict[str, dict[str, str]] = {}

    def run(self) -> None:
        if not isinstance(self._definitions, dict):
            raise InvalidArgument(f"{self._where}.$defs: must be an object")
        self._visit(self._where, self._root, 0, {})
        for name, definition in self._definitions.items():
            through = self._through[name] = {}
            self._visit(f"{self._where}.$defs.{name[:80]}", definition, 1, through)
        known: set[str] = set()
        for name in self._definitions:
            self._check_chain(name, (), known)

    def _visit(self, at: str, schema: Any, depth: int, through: dict[str, str] | None) -> None:
        """Validate `schema`; `through` takes the definitions that it is, before any value."""
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
        self._cost.add(self._where, *_costs(schema))
        for name, inner in schema.get("properties", {}).items():
            self._visit(f"{at}.properties.{name}", inner, depth + 1, None)
        for name in ("items", "additionalProperties"):
            if name in schema and not (name == "additionalProperties" and schema[name] is False):
                self._visit(f"{at}.{name}", schema[name], depth + 1, None)
        for place, inner in enumerate(schema.get("anyOf", [])):
            self._visit(f"{at}.anyOf[{place}]", inner, depth + 1, through)
        if "$ref" in schema:
            self._follow(at, schema["$ref"], through)

    def _follow(self, at: str, reference: Any, through: dict[str, str] | None) -> None:
        name = str(reference).removeprefix(DEFINITIONS)
        if reference != f"{DEFINITIONS}{name}" or name not in self._definitions or "/" in name:
            raise InvalidArgument(
                f"{at[:200]}.$ref={str(reference)[:80]!r}: must name one of $defs, without '/'"
            )
        if through is not None:
            through[name] = at[:200]

    def _check_chain(self, name: str, before: tuple[str, ...], known: set[str]) -> None:
        """Refuse a definition that is itself, or a chain of them that is too long."""
        if name in known:
            return
        if len(before) > _MAX_DEPTH:
            raise InvalidArgument(
                f"{self._where}.$defs.{name[:80]}: behind more than {_MAX_DEPTH} references"
            )
        for following, at in self._through[name].items():
            if following in (*before, name):
                reference = f"{DEFINITIONS}{following}"
                raise InvalidArgument(f"{at}.$ref={reference[:80]!r}: refers to itself")
            self._check_chain(following, (*before, name), known)
        known.add(name)

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
                    f"{at}.properties: {name[:80]!r}: a name has 1 to 64 characters, and no quote,"
                    " backslash or control character"
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


def _costs(schema: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """What a schema alone adds to a `SchemaCost`; it is valid."""
    kinds = schema.get("type")
    optional = len(schema.get("properties", {}).keys() - set(schema.get("required", [])))
    return (
        len(kinds) if isinstance(kinds, list) else 1,
        optional * optional,
        schema.get("maxItems", schema.get("minItems", 0)),
        sum(len(str(value)) for value in schema.get("enum", [])),
    )


def are_scalars(values: Any) -> bool:
    """Whether it is a list of plain values, and not empty."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(value is None or isinstance(value, str | int | float) for value in values)
    )
