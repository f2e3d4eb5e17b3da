"""Regular expressions for guided decoding: the part of them that every engine's compiler takes.

Characters, escapes, classes, groups, alternatives and repetition, matched as a whole. Anchors are
allowed at both ends alone. Bounds of repetitions multiply where they are nested, so what they make
is bounded, not only the length: OpenVINO compiles while all requests wait. The bounds were found by
measuring it: within them, what it takes longest for takes it seconds, not minutes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cog_triton.errors import InvalidArgument

MAX_LENGTH = 32 << 10
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
_REPEAT = re.compile(r"\{(\d{1,5})(,(\d{0,5}))?\}")
_CLASSES = "dDsSwW"
_WIDE_CLASSES = "DSwW"
_PLAIN_ESCAPES = "nrtfv"
_HEXADECIMAL = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}")
_PUNCTUATION = "\\^$.|?*+()[]{}/\"'-,:;=!<>@#%&~`_ "


def check_regex(text: str, where: str) -> None:
    """Raise E1005, after `where`, for an expression that is not one of these."""
    if len(text) > MAX_LENGTH:
        raise InvalidArgument(f"{where}: has {len(text)} characters; {MAX_LENGTH} at most")
    _Parser(text, where).run()


_MANY = 1 << 20


class _Size(NamedTuple):
    """Size of a part, written out: characters and classes, wide ones, and repetitions."""

    atoms: int
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


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self._text = text.removeprefix("^")
        if self._text.endswith("$") and not _is_escaped(self._text, len(self._text) - 1):
            self._text = self._text[:-1]
        self._where = where
        self._at = 0
        self._repetitions = 0

    def run(self) -> None:
        size = self._alternatives(0)
        if self._at < len(self._text):
            raise self._refused("a ')' without its '('")
        for what, found, most in (
            ("more characters", size.atoms - len(self._text), _MAX_GROWTH),
            (f"characters or classes of more than {_NARROW}", size.wide, _MAX_WIDE),
            ("repetitions of varying length", size.loops, _MAX_LOOPS),
            ("of those of wide classes", size.wide_loops, _MAX_WIDE_LOOPS),
            ("lengths of those together", size.lengths, _MAX_LENGTHS),
            ("characters", size.atoms, _MAX_ATOMS),
        ):
            if found > most:
                raise InvalidArgument(
                    f"{self._where}: takes too long to compile: written out, it has {found}"
                    f" {what}; {most} at most"
                )

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _refused(self, what: str) -> InvalidArgument:
        shown = self._text[self._at : self._at + 20]
        return InvalidArgument(f"{self._where}: {what}, at {shown!r}")

    def _alternatives(self, depth: int) -> _Size:
        if depth > _MAX_DEPTH:
            raise self._refused(f"nested deeper than {_MAX_DEPTH} levels")
        size = self._sequence(depth)
        while self._next == "|":
            self._at += 1
            size = size.plus(self._sequence(depth))
        return size

    def _sequence(self, depth: int) -> _Size:
        size = _Size(0)
        while self._next not in ("", "|", ")"):
            size = size.plus(self._repeated(self._atom(depth)))
        if not size.atoms:
            raise self._refused("an alternative is empty")
        return size

    def _atom(self, depth: int) -> _Size:
        character = self._next
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._class()
        if character == "\\":
            escaped = self._escape()
            return _Size(1, int(escaped is None and self._text[self._at - 1] in _WIDE_CLASSES))
        if character in "*+?{":
            raise self._refused("nothing to repeat")
        if character in "^$":
            raise self._refused("an anchor inside")
        self._at += 1
        return _Size(1, int(character == "."))

    def _group(self, depth: int) -> _Size:
        self._at += 1
        if self._next == "?":
            if not self._text.startswith("?:", self._at):
                raise self._refused("groups may be ( ) or (?: ), without names or looking around")
            self._at += 2
        size = self._alternatives(depth + 1)
        if self._next != ")":
            raise self._refused("a '(' without its ')'")
        self._at += 1
        return size

    def _class(self) -> _Size:
        self._at += 1
        width = 0
        if self._next == "^":
            self._at += 1
            width = _NARROW + 1
        if self._next in ("]", ""):
            raise self._refused("a class is empty")
        while self._next != "]":
            low = high = self._class_member()
            if self._next == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_member()
                if low is None or high is None or low > high:
                    raise self._refused("a range of a class has no order")
            if low is None or high is None:  # about how many characters one like \d is of
                width += _NARROW + 1 if self._text[self._at - 1] in _WIDE_CLASSES else 10
            else:
                width += ord(high) - ord(low) + 1
        self._at += 1
        return _Size(1, int(width > _NARROW))

    def _class_member(self) -> str | None:
        """Take a member of a class; the character, None for one like \\d."""
        character = self._next
        if character == "":
            raise self._refused("a '[' without its ']'")
        if character == "\\":
            return self._escape()
        if character == "[":
            raise self._refused("a '[' in a class must be \\[")
        self._at += 1
        return character

    def _escape(self) -> str | None:
        found = _HEXADECIMAL.match(self._text, self._at + 1)
        if found:
            self._at = found.end()
            return chr(int(found[0][1:], 16))
        character = self._text[self._at + 1 : self._at + 2]
        if not character or character not in _CLASSES + _PLAIN_ESCAPES + _PUNCTUATION:
            raise self._refused("an unknown escape")
        self._at += 2
        return None if character in _CLASSES else character

    def _repeated(self, size: _Size) -> _Size:
        if self._next in ("*", "+", "?"):
            least, most = int(self._next == "+"), 1 if self._next == "?" else None
            self._at += 1
        elif self._next == "{":
            found = _REPEAT.match(self._text, self._at)
            if not found:
                raise self._refused("a repetition is {m}, {m,} or {m,n}")
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            if least > (least if most is None else most) or max(least, most or 0) > _MAX_REPEAT:
                raise self._refused(f"a repetition must be in order, and {_MAX_REPEAT} at most")
            self._at = found.end()
        else:
            return size
        self._repetitions += 1
        if self._repetitions > _MAX_REPETITIONS:
            raise self._refused(f"more than {_MAX_REPETITIONS} repetitions")
        if self._next == "?":
            self._at += 1
        if self._next in ("*", "+", "{", "?") and self._next:
            raise self._refused("nothing to repeat")
        return size.repeated(least, most)


def _is_escaped(text: str, place: int) -> bool:
    before = text[:place]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
