"""Guide of guided decoding: what an output must match, checked before any engine compiles it.

An engine compiles a grammar from it while other requests wait, and one that does not compile ends
OpenVINO's pipeline: so sizes are bounded, and of expressions only what is known to compile passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from cog_triton.errors import InvalidArgument
from cog_triton.text.json_schema import parse_schema
from cog_triton.text.regex_check import check_regex
from cog_triton.text.tool_schema import check_structural_tag

GuideKind = Literal["json_schema", "regex", "grammar", "structural_tag", "native_tag"]
"""Kinds of guides; grammars are in EBNF, and structural tags in JSON, as xgrammar reads them.

A native tag is one that vLLM has made for its own parser, of any form; vLLM alone takes it.
"""
_MAX_GRAMMAR = 16 << 10
_MAX_DEPTH = 24
_MAX_TAG, _MAX_TAG_DEPTH = 256 << 10, 128
_MAX_CHOICES = 256
_MAX_CHOICE_CHARACTERS = 16 << 10
_OPENING, _CLOSING = "([{", ")]}"
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/\"'\-]")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class Guide(NamedTuple):
    """What an output must match, as text of its kind."""

    kind: GuideKind
    text: str

    def check(self, where: str) -> None:
        """Raise E1005, after `where`, for what no engine may get."""
        if self.kind == "json_schema":
            parse_schema(self.text, where)
        elif self.kind == "regex":
            check_regex(self.text, where)
        elif self.kind == "structural_tag":
            check_structural_tag(self.text, where)
        elif self.kind == "native_tag":
            _check_size(self.text, where, _MAX_TAG, _MAX_TAG_DEPTH)
        else:
            _check_grammar(self.text, where)


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


def _check_grammar(text: str, where: str) -> None:
    if not text.strip():
        raise InvalidArgument(f"{where}: is empty")
    _check_size(text, where, _MAX_GRAMMAR, _MAX_DEPTH)


def _check_size(text: str, where: str, most: int, most_depth: int) -> None:
    if len(text) > most:
        raise InvalidArgument(f"{where}: has {len(text)} characters; {most} at most")
    depth = deepest = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    if deepest > most_depth:
        raise InvalidArgument(f"{where}: nested deeper than {most_depth} levels")
