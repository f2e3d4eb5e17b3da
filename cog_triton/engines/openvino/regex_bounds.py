"""Bounds of regular expressions that guide OpenVINO: those that xgrammar compiles in time.

Characters, escapes, classes, groups, alternatives and repetition, matched as a whole. Anchors are
allowed at both ends alone. Bounds of repetitions multiply where they are nested, so what they make
is bounded, not only the length: OpenVINO compiles while all requests wait. The bounds were found by
measuring it: within them, what it takes longest for takes it seconds, not minutes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cog_triton.errors import InvalidArgument

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
    """Size of an expression, each of whose parts is one that xgrammar takes."""

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
    """Least and most times of a repetition, None for no end."""
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
