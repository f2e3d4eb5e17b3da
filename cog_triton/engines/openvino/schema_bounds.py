"""Bounds of JSON Schemas that guide OpenVINO: the subset that xgrammar compiles, and in time.

A schema that its compiler cannot take must not get there: in OpenVINO 2026.4 one such schema ends
the whole pipeline, and all requests with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from cog_triton.errors import InvalidArgument, nearest
from cog_triton.text.tool_schema import DEFINITIONS, KEYWORDS, MAX_ITEMS, NAME, TYPES, are_scalars

_ANNOTATIONS = ("$schema", "title", "description", "default", "examples")
_MAX_DEPTH = 24


def _are_types(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(isinstance(kind, str) and kind in TYPES for kind in listed)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"must be of {', '.join(TYPES)}"),
    "properties": (
        lambda value: isinstance(value, dict) and all(map(NAME.fullmatch, value)),
        "must be an object; a name has 1 to 64 characters, and no quote, backslash or control"
        " character",
    ),
    "required": (lambda value: isinstance(value, list), "must be a list of names of properties"),
    "additionalProperties": (
        lambda value: isinstance(value, bool | dict),
        "must be true, false or a schema",
    ),
    "minItems": (
        lambda value: type(value) is int and 0 <= value <= MAX_ITEMS,
        f"must be from 0 to {MAX_ITEMS}",
    ),
    "enum": (are_scalars, "must be a list of texts, numbers, booleans or null"),
    "const": (lambda value: are_scalars([value]), "must be a text, number, boolean or null"),
    "anyOf": (
        lambda value: isinstance(value, list) and bool(value),
        "must be a list of schemas, not empty",
    ),
    "$defs": (lambda value: isinstance(value, dict), "must be an object"),
}
_RULES["maxItems"] = _RULES["minItems"]
"""What the value of a keyword must be."""


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


def check_schema(schema: Any, where: str, cost: SchemaCost | None = None) -> None:
    """Raise E1005 naming the place in `schema`, after `where`, that is not one of these.

    Several schemas of one guide share a `cost`.
    """
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{where}: must be a JSON object")
    _Check(schema, where, cost or SchemaCost()).run()


class _Check:
    """Validation that visits each definition once, however many references lead to it."""

    def __init__(self, root: dict[str, Any], where: str, cost: SchemaCost) -> None:
        self._where = where
        self._cost = cost
        self._root = root
        self._definitions = root.get("$defs", {})
        self._through: dict[str, dict[str, str]] = {}

    def run(self) -> None:
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
        for name, value in schema.items():
            fits, rule = _RULES.get(name, (None, ""))
            if fits and not fits(value):
                raise InvalidArgument(f"{at}.{name}={str(value)[:80]}: {rule}")
        properties = schema.get("properties", {})
        if any(str(name) not in properties for name in schema.get("required", ())):
            raise InvalidArgument(f"{at}.required: {_RULES['required'][1]}")
        least = schema.get("minItems", 0)
        if least and "items" not in schema:
            raise InvalidArgument(f"{at}.minItems={least}: needs items")
        if least > (most := schema.get("maxItems", MAX_ITEMS)):
            raise InvalidArgument(f"{at}.minItems={least}: must not exceed maxItems={most}")


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
