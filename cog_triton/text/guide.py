"""Guide of guided decoding: what an output must match, and the bounds that all engines have.

An engine compiles a grammar from it, and a family may take less: `Abilities.check_guide`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from cog_triton.errors import InvalidArgument
from cog_triton.text import client_json

GuideKind = Literal["json_schema", "regex", "grammar", "structural_tag", "native_tag"]
"""Kinds of guides; grammars are in EBNF, and structural tags in JSON, as xgrammar reads them.

A native tag is one that vLLM has made for its own parser, of any form; vLLM alone takes it.
"""
_BOUNDS: dict[GuideKind, tuple[int, int]] = {
    "json_schema": (64 << 10, 128),
    "regex": (32 << 10, 64),
    "grammar": (16 << 10, 24),
    "structural_tag": (128 << 10, 128),
    "native_tag": (256 << 10, 128),
}
"""Most characters, and levels of brackets."""
_MAX_CHOICES = 256
_MAX_CHOICE_CHARACTERS = 16 << 10
_OPENING, _CLOSING = "([{", ")]}"
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/\"'\-]")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class Guide(NamedTuple):
    """What an output must match, as text of its kind."""

    kind: GuideKind
    text: str

    def check(self, where: str) -> None:
        """Raise E1005, after `where`, for what no engine may get."""
        most, most_depth = _BOUNDS[self.kind]
        if not self.text.strip():
            raise InvalidArgument(f"{where}: is empty")
        if len(self.text) > most:
            raise InvalidArgument(f"{where}: has {len(self.text)} characters; {most} at most")
        depth = deepest = 0
        for character in _ESCAPED.sub("", self.text):
            depth += (character in _OPENING) - (character in _CLOSING)
            deepest = max(deepest, depth)
        if deepest > most_depth:
            raise InvalidArgument(f"{where}: nested deeper than {most_depth} levels")
        if self.kind in ("json_schema", "structural_tag"):
            self.value(where)

    def value(self, where: str) -> dict[str, Any]:
        """The JSON object that a schema or a structural tag is; raises E1005, after `where`."""
        try:
            value = client_json.parse(self.text)
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        except ValueError as error:
            raise InvalidArgument(f"{where}: not JSON: {str(error)[:100]}") from None
        if not isinstance(value, dict):
            raise InvalidArgument(f"{where}: must be a JSON object")
        return value


def choice_guide(choices: Sequence[str], where: str) -> Guide:
    """The guide that an output is one of `choices`; raises E1005."""
    if not choices or "" in choices:
        raise InvalidArgument(f"{where}: must be texts to choose from, none of them empty")
    if len(choices) > _MAX_CHOICES:
        raise InvalidArgument(f"{where}: has {len(choices)} choices; {_MAX_CHOICES} at most")
    if (size := sum(map(len, choices))) > _MAX_CHOICE_CHARACTERS:
        raise InvalidArgument(f"{where}: has {size} characters; {_MAX_CHOICE_CHARACTERS} at most")
    return Guide("regex", "|".join(escaped(choice, where) for choice in choices))


def escaped(text: str, where: str) -> str:
    """The expression of exactly `text`; raises E1005 for control characters that JSON escapes."""
    if any(ord(character) < 32 and character not in _CONTROLS for character in text):
        raise InvalidArgument(f"{where}: holds a control character")
    escaped = _SPECIAL.sub(lambda found: f"\\{found[0]}", text)
    return "".join(_CONTROLS.get(character, character) for character in escaped)
