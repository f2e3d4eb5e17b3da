"""Pythonic: ``[f(a=1), g(b="x")]`` as the answer's start; Llama 3.2 and 4, LFM2, ToolACE.

Parsed without Python's compiler, which warns about escapes that models write, and takes far more
than literals.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from cog_triton.serving.openai.parsers.call_parser import CallParser

_STARTS = ("<|python_start|>", "<|tool_call_start|>")
_ENDS = ("<|python_end|>", "<|tool_call_end|>")
_START = re.compile(r"\[\s*([A-Za-z_][\w.-]{0,63})\s*\(", re.ASCII)
_OPEN_START = re.compile(r"(?:\[\s{0,63}(?:[A-Za-z_][\w.-]{0,63}\s{0,63})?)?", re.ASCII)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_KEYWORD = re.compile(r"[^\W\d]\w*")
_STRING = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5})|(.))", re.DOTALL
)
_SPELLED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_DEPTH = 64
_MOST_DIGITS = 300

Calls = list[tuple[str, dict[str, Any]]]


class NotCalls(ValueError):
    """The text is not a list of calls."""


class PythonicParser(CallParser):
    """Parser of a list of calls, given when it ends: at the start, or after a marker.

    All of a list are calls, or it is text.
    """

    markers = (*_STARTS, *_ENDS)
    openings = _STARTS
    endings = _ENDS

    def _begin(self, final: bool) -> bool:
        """See `CallParser._begin`: a list may begin at once."""
        return self._opened(final)

    def _opened(self, final: bool) -> bool:
        """Look at how the list begins: a bracket and the name of a tool."""
        self._keep_space()
        start = _START.match(self._buffer)
        if start is None and _OPEN_START.fullmatch(self._buffer) and not final:
            return False
        if start is None or start[1] not in self._tools:
            self._reject()
        else:
            self._open: list[str] = []
            self._quote, self._escaped = "", False
            self._list_start = len(self._candidate)
            self._state = self._in_list
        return True

    def _in_list(self, final: bool) -> bool:
        """Look for the end of the list."""
        for place, char in enumerate(self._buffer, 1):
            if not self._follow(char):
                self._candidate.append(self._take(place))
                return self._close()
        self._candidate.append(self._take(len(self._buffer)))
        return False

    def _follow(self, char: str) -> bool:
        """Follow strings and brackets; False at the end of the list, or at a wrong bracket."""
        if self._quote:
            ends = char == self._quote and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._quote = "" if ends else self._quote
        elif char in "'\"":
            self._quote = char
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char in _CLOSING.values():
            return self._open.pop() == char and bool(self._open)
        return True

    def _close(self) -> bool:
        text = "".join(self._candidate[self._list_start :])
        try:
            calls = parse_calls(text)
        except NotCalls:
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls):
            self._reject()
            return True
        for name, arguments in calls:
            self._call(name)
            self._argue(json.dumps(arguments, ensure_ascii=False))
        self.completed += len(calls)
        self._state = self._after_call
        return True


def parse_calls(text: str) -> Calls:
    """Names and keyword arguments of a list of calls; raises NotCalls."""
    reader = _Reader(text)
    calls = reader.items("[", "]", reader.call)
    reader.skip_space()
    if not calls or reader.place != len(text):
        raise NotCalls
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self.place = 0

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self._match(_NAME)[0]
        arguments = dict(pairs := self.items("(", ")", self._keyword))
        if len(arguments) < len(pairs):
            raise NotCalls
        return name, arguments

    def items(self, opening: str, closing: str, read: Any) -> list[Any]:
        """What `read` gives for each of the items, which commas separate."""
        self._depth += 1
        if self._depth > _MAX_DEPTH or not self._skip(opening):
            raise NotCalls
        found = []
        while not self._skip(closing):
            found.append(read())
            if not self._skip(",") and not self._sees(closing):
                raise NotCalls
        self._depth -= 1
        return found

    def _keyword(self) -> tuple[str, Any]:
        self.skip_space()
        name = self._match(_KEYWORD)[0]
        if not self._skip("="):
            raise NotCalls
        return name, self._value()

    def _entry(self) -> tuple[str, Any]:
        key = self._value()
        if not isinstance(key, str) or not self._skip(":"):
            raise NotCalls
        return key, self._value()

    def _value(self) -> Any:
        self.skip_space()
        char = self._text[self.place : self.place + 1]
        if char == "[":
            return self.items("[", "]", self._value)
        if char == "(":
            return self.items("(", ")", self._value)
        if char == "{":
            return dict(self.items("{", "}", self._entry))
        if char in ("'", '"'):
            string = self._match(_STRING)
            return _ESCAPE.sub(_unescaped, string[1] if string[1] is not None else string[2])
        if char.isalpha():
            word = self._match(_KEYWORD)[0]
            if word in _WORDS:
                return _WORDS[word]
            raise NotCalls
        return _number(self._match(_NUMBER)[0])

    def skip_space(self) -> None:
        self._match(_SPACE)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self.place)
        if found is None:
            raise NotCalls
        self.place = found.end()
        return found

    def _sees(self, char: str) -> bool:
        self.skip_space()
        return self._text.startswith(char, self.place)

    def _skip(self, char: str) -> bool:
        seen = self._sees(char)
        self.place += seen
        return seen


def _number(text: str) -> int | float:
    if len(text) > _MOST_DIGITS:
        raise NotCalls
    if not set(text) & set(".eE"):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise NotCalls
    return value


def _unescaped(escape: re.Match[str]) -> str:
    if digits := escape[1] or escape[2] or escape[3]:
        return chr(int(digits, 16))
    return _SPELLED.get(escape[4], escape[4] if escape[4] in "\\'\"" else escape[0])
