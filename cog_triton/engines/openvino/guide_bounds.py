"""Bounds of expressions and JSON Schemas that guide OpenVINO: what xgrammar compiles, and in time.

A schema that its compiler cannot take must not get there: in OpenVINO 2026.4 one such schema ends
the whole pipeline, and all requests with it. OpenVINO compiles while all requests wait. The bounds
were found by measuring it: within them, what it takes longest for takes it seconds, not minutes.

Expressions are of characters, escapes, classes, groups, alternatives and repetition, matched as a
whole. Anchors are allowed at both ends alone. Bounds of repetitions multiply where they are nested,
so what they make is bounded, not only the length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from cog_triton.errors import InvalidArgument, nearest
from cog_triton.text.tool_schema import DEFINITIONS, KEYWORDS, MAX_ITEMS, NAME, TYPES, are_scalars

_MAX_REPETITIONS = 128
_MAX_DEPTH = 16
_MAX_GROWTH = 1024
"""Characters and classes that written-out repetitions may add."""
_MAX_REPEAT = 512
_MAX_WIDE = 128
"""Written-out characters that may be one of many: each costs a walk through the vocabulary."""
_MAX_LOOPS = 16
_MAX_WIDE_LOOPS = 8
"""Written-out repetitions of varying length: what they match together grows as a power of two."""
_MAX_LENGTHS = 4096
_NARROW = 16
_MAX_ATOMS = (16 << 10) + 256
_ESCAPE = (
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
    r"|[dDsSwWnrtfv^$.|?*+()\[\]{}/\"'\\,:;=!<>@#%&~`_ -])"
)
_MEMBER = rf"(?:{_ESCAPE}|[^\\\[\]])"
_TOKEN = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<class>\[(?!\^\])\^?{_MEMBER}+\])|(?P<open>\((?:\?:|(?!\?)))|(?P<close>\))"
    r"|(?P<bar>\|)|(?P<repeat>[*+?]|\{(\d{1,5})(,(\d{0,5}))?\})\??|(?P<character>[^\\\[(){*+?^$])",
    re.DOTALL,
)
_RANGE = re.compile(rf"({_MEMBER})(?:-({_MEMBER}))?", re.DOTALL)
_MANY = 1 << 20


class _Size(NamedTuple):
    """Size of a part, written out: characters and classes, wide ones, and repetitions."""

    atoms: int = 0
    wide: int = 0
    loops: int = 0
    wide_loops: int = 0
    lengths: int = 1
    """In how many lengths the wide repetitions may come together, a product."""

    def plus(self, other: _Size) -> _Size:
        """Size of both parts."""
        added = _Size(*(a + b for a, b in zip(self, other, strict=True)))
        return added._replace(lengths=min(self.lengths * other.lengths, _MANY))

    def repeated(self, least: int, most: int | None) -> _Size:
        """Size of a repetition; without `most` it has no end."""
        times = max(least, most or 0, 1)
        loop = int(least != most)
        wide = loop if self.wide else 0
        lengths = min(self.lengths**times, _MANY)
        return _Size(
            self.atoms * times,
            self.wide * times,
            self.loops * times + loop,
            self.wide_loops * times + wide,
            lengths * (2 if most is None else most - least + 1) if wide else lengths,
        )


def check_regex(text: str, where: str) -> None:
    """Raise E1005, after `where`, for an expression that is not one of these."""
    body = text.removeprefix("^")
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2:
        body = body[:-1]
    size = _written_out(body, where)
    for what, found, most in (
        ("more characters", size.atoms - len(body), _MAX_GROWTH),
        (f"characters or classes of more than {_NARROW}", size.wide, _MAX_WIDE),
        ("repetitions of varying length", size.loops, _MAX_LOOPS),
        ("of those of wide classes", size.wide_loops, _MAX_WIDE_LOOPS),
        ("lengths of those together", size.lengths, _MAX_LENGTHS),
        ("characters", size.atoms, _MAX_ATOMS),
    ):
        if found > most:
            raise InvalidArgument(
                f"{where}: takes too long to compile: written out, it has {found}"
                f" {what}; {most} at most"
            )


def _written_out(text: str, where: str) -> _Size:
    def refused(what: str) -> InvalidArgument:
        return InvalidArgument(f"{where}: {what}, at {text[at : at + 20]!r}")

    at = repetitions = 0
    outer: list[_Size] = []
    whole, last, empty = _Size(), None, True  # of the group, and its last part
    while at < len(text):
        if not (found := _TOKEN.match(text, at)):
            raise refused(
                "must be characters, classes, (groups) without names or looking around, known"
                " escapes, and {m}, {m,} or {m,n}; anchors are at both ends"
            )
        kind, part = found.lastgroup or "repeat", found[0]
        if kind == "repeat":
            if last is None:
                raise refused("nothing to repeat")
            least, most = _bounds(found)
            if (most is not None and (least > most or most > _MAX_REPEAT)) or least > _MAX_REPEAT:
                raise refused(f"a repetition must be in order, and {_MAX_REPEAT} at most")
            if (repetitions := repetitions + 1) > _MAX_REPETITIONS:
                raise refused(f"more than {_MAX_REPETITIONS} repetitions")
            whole, last = whole.plus(last.repeated(least, most)), None
            at = found.end()
            continue
        if last is not None:
            whole, last = whole.plus(last), None
        if kind == "open":
            if len(outer) == _MAX_DEPTH:
                raise refused(f"nested deeper than {_MAX_DEPTH} levels")
            outer.append(whole)
            whole, empty = _Size(), True
        elif kind in ("bar", "close"):
            if empty:
                raise refused("an alternative is empty")
            if kind == "close":
                if not outer:
                    raise refused("a ')' without its '('")
                whole, last = outer.pop(), whole
            empty = kind == "bar"
        else:
            inner = part[1:-1].removeprefix("^")
            members = _RANGE.findall(inner) if kind == "class" else [(part, "")]
            if any(high and not _is_range(low, high) for low, high in members):
                raise refused("a range of a class has no order")
            wide = part == "." or part.startswith("[^") or sum(map(_width, members)) > _NARROW
            last, empty = _Size(1, int(wide)), False
        at = found.end()
    if empty:
        raise refused("an alternative is empty")
    if outer:
        raise refused("a '(' without its ')'")
    return whole if last is None else whole.plus(last)


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    if (sign := found["repeat"]) in ("*", "+", "?"):
        return int(sign == "+"), 1 if sign == "?" else None
    least, comma, most = (found[place] for place in (7, 8, 9))
    return int(least), int(least) if comma is None else int(most) if most else None


def _is_range(low: str, high: str) -> bool:
    return _width((low, "")) == _width((high, "")) == 1 and _code(low) <= _code(high)


def _width(member: tuple[str, str]) -> int:
    """About how many characters a member of a class is; a range has an end."""
    low, high = member
    if high:
        return _code(high) - _code(low) + 1
    if low[0] == "\\" and low[1] in "dsDSwW":
        return 10 if low[1] in "ds" else _NARROW + 1
    return 1


def _code(member: str) -> int:
    if member[0] == "\\" and member[1] in "xu":
        return int(member[2:], 16)
    return ord(member[-1])


_ANNOTATIONS = ("$schema", "title", "description", "default", "examples")
_MAX_SCHEMA_DEPTH = 24


def _are_types(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(isinstance(kind, str) and kind in TYPES for kind in listed)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ITEMS


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"must be of {', '.join(TYPES)}"),
    "properties": (
        lambda value: isinstance(value, dict) and all(map(NAME.fullmatch, value)),
        "must be an object; a name has 1 to 64 characters, and no quote, backslash or control"
        " character",
    ),
    "required": (lambda value: isinstance(value, list), "must be a list of names of properties"),
    "additionalProperties": (lambda value: isinstance(value, bool | dict), "must be a schema"),
    "minItems": (_is_size, f"must be from 0 to {MAX_ITEMS}"),
    "maxItems": (_is_size, f"must be from 0 to {MAX_ITEMS}"),
    "enum": (are_scalars, "must be a list of texts, numbers, booleans or null"),
    "const": (lambda value: are_scalars([value]), "must be a text, number, boolean or null"),
    "anyOf": (lambda value: isinstance(value, list) and bool(value), "must be a list of schemas"),
    "$defs": (lambda value: isinstance(value, dict), "must be an object"),
}
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
        if depth > _MAX_SCHEMA_DEPTH:
            raise InvalidArgument(f"{at[:200]}: nested deeper than {_MAX_SCHEMA_DEPTH} levels")
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
        if len(before) > _MAX_SCHEMA_DEPTH:
            raise InvalidArgument(
                f"{self._where}.$defs.{name[:80]}: behind more than {_MAX_SCHEMA_DEPTH} references"
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
    kinds = schema.get("type")
    optional = len(schema.get("properties", {}).keys() - set(schema.get("required", [])))
    return (
        len(kinds) if isinstance(kinds, list) else 1,
        optional * optional,
        schema.get("maxItems", schema.get("minItems", 0)),
        sum(len(str(value)) for value in schema.get("enum", [])),
    )
