"""Incremental scanners of JSON: of one value, and of a tool call that is one object."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

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


_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id")


class CallObject:
    """Parser of ``{"name": "f", "arguments": {...}}``; Llama calls them ``parameters``.

    It is a call from the moment that its name is one of `tools` and its arguments have begun:
    `name` is set then. Arguments may come before the name, and as JSON within a string. Any other
    object is `broken` at the first character that shows it, so that little text is held back.
    """

    def __init__(self, tools: Collection[str]) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self.complete = False
        """Whether the arguments have ended."""
        self._tools = tools
        self._expected = "{"
        self._keys: set[str] = set()
        self._key = ""
        self._known_name: str | None = None
        self._early: str | None = None
        self._value: JsonValue | None = None
        self._scanned: list[str] = []

    @property
    def in_arguments(self) -> bool:
        """Whether what follows belongs to the arguments of a call."""
        return self.name is not None and not self.complete

    def take(self, text: str) -> tuple[int, str]:
        """How many characters of `text` were taken, and the arguments among them.

        The rest must be given again, with more, unless the object is done or broken.
        """
        place, arguments = 0, []
        while place < len(text) and not (self.done or self.broken):
            if self._value is None:
                place += self._structure(text[place])
                continue
            after = self._value.take(text, place)
            arguments.append(self._scan(self._value, text[place:after]))
            if after == place and self._value is not None:
                break
            place = after
        return place, "".join(arguments)

    def _structure(self, char: str) -> int:
        """Take a character between keys and values; 0 if it is not taken."""
        expected = self._expected
        if char in SPACE:
            return 1
        if char == expected == "{" or (char == "," and expected == ",}"):
            self._expected = "key"
        elif char == expected == ":":
            self._expected = "value"
        elif char == "}" and expected == ",}" and self.name is not None:
            self.done = True
        elif expected == "key" and char == '"':
            return self._begin()
        elif expected == "value" and (char == '"' or (char == "{" and self._key in _ARGUMENTS)):
            if char == "{":
                self.name = self._known_name  # if it is known, they are given as they come
            return self._begin()
        else:
            self.broken = True
            return 0
        return 1

    def _begin(self) -> int:
        self._value, self._scanned = JsonValue(), []
        return 0

    def _scan(self, value: JsonValue, part: str) -> str:
        """Take a part of a key or value; the arguments that it gives."""
        self.broken = value.broken
        streamed = self.in_arguments
        if not streamed:
            self._scanned.append(part)
        if value.done:
            self._value = None
            if self._expected == "key":
                self._end_key(json.loads("".join(self._scanned)))
            else:
                self._expected = ",}"
                if streamed:
                    self.complete = True
                else:
                    return self._end_value("".join(self._scanned))
        return part if streamed else ""

    def _end_key(self, key: str) -> None:
        kind = "arguments" if key in _ARGUMENTS else key
        self.broken = key not in _KEYS or kind in self._keys
        self._keys.add(kind)
        self._key, self._expected = key, ":"

    def _end_value(self, text: str) -> str:
        """End a value; gives the arguments as soon as both they and the name are there."""
        if self._key == "name":
            self._known_name = json.loads(text)
            self.broken = self._known_name not in self._tools
        elif self._key in _ARGUMENTS:
            self._early = text if text[0] == "{" else _object_in(json.loads(text))
            self.broken = self._early is None
        if self.broken or self._early is None or self._known_name is None or self.complete:
            return ""
        self.name, self.complete = self._known_name, True
        return self._early


def _object_in(text: str) -> str | None:
    """The JSON object that a string holds, if it holds one."""
    text, value = text.strip(SPACE), JsonValue()
    end = value.take(text)
    return text if text[:1] == "{" and value.done and end == len(text) else None
