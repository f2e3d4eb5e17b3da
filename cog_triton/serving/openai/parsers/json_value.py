"""Incremental JSON scanner: finds the end of one value, and the first character that breaks it."""

from __future__ import annotations

import re

from cog_triton.text.client_json import MAX_DEPTH, MAX_NUMBER

SPACE = " \t\n\r"
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.\w]+", re.ASCII)
_LITERAL = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)

_VALUE = "a value"
_FIRST_ITEM = "a value or ]"
_FIRST_KEY = "a key or }"
_KEY = "a key"
_COLON = ":"
_NEXT = ", or the end"


class JsonValue:
    """Scanner of one JSON value, as strict as RFC 8259; depth and numbers bounded as a client's.

    So a call that the server made comes through when it is sent back among messages.

    `done` once it has ended, `broken` once no text can make it valid. A number alone ends at what
    follows it.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._expected = _VALUE
        self._in_string = False
        self._is_key = False
        self._open: list[str] = []

    def take(self, text: str, start: int = 0) -> int:
        """Scan `text` from `start`; returns where it stopped.

        That is before the end of `text` if the value is done or broken there, or if only more text
        can tell what a number, literal or escape is: the rest must be given again then.
        """
        place = start
        while place < len(text) and not (self.done or self.broken):
            after = self._string(text, place) if self._in_string else self._token(text, place)
            if after == place:
                break
            place = after
        return place

    def _string(self, text: str, place: int) -> int:
        if run := _RUN.match(text, place):
            return run.end()
        if text[place] == '"':
            self._in_string = False
            if self._is_key:
                self._is_key, self._expected = False, _COLON
            else:
                self._end_value()
            return place + 1
        if escape := _ESCAPE.match(text, place):
            return escape.end()
        self.broken = not _OPEN_ESCAPE.fullmatch(text, place)
        return place

    def _token(self, text: str, place: int) -> int:
        char, expected = text[place], self._expected
        if char in SPACE:
            return place + 1
        if expected in (_VALUE, _FIRST_ITEM) and char in '{["':
            self._begin(char)
        elif char == '"' and expected in (_KEY, _FIRST_KEY):
            self._in_string = self._is_key = True
        elif char == ":" and expected == _COLON:
            self._expected = _VALUE
        elif char == "," and expected == _NEXT:
            self._expected = _KEY if self._open[-1] == "{" else _VALUE
        elif char in "]}" and self._closes(char):
            self._open.pop()
            self._end_value()
        elif expected in (_VALUE, _FIRST_ITEM):
            return self._word(text, place)
        else:
            self.broken = True
            return place
        return place if self.broken else place + 1

    def _begin(self, char: str) -> None:
        if char == '"':
            self._in_string = True
        elif len(self._open) == MAX_DEPTH:
            self.broken = True
        else:
            self._open.append(char)
            self._expected = _FIRST_KEY if char == "{" else _FIRST_ITEM

    def _closes(self, char: str) -> bool:
        if not self._open or {"{": "}", "[": "]"}[self._open[-1]] != char:
            return False
        return self._expected in (_NEXT, _FIRST_KEY if char == "}" else _FIRST_ITEM)

    def _word(self, text: str, place: int) -> int:
        word = _WORD.match(text, place)
        end = word.end() if word else place
        if end - place > MAX_NUMBER:
            self.broken = True
        elif end < len(text):
            if _LITERAL.fullmatch(text, place, end):
                self._end_value()
                return end
            self.broken = True
        return place

    def _end_value(self) -> None:
        if self._open:
            self._expected = _NEXT
        else:
            self.done = True
