"""Incremental parser of a tool call that is one JSON object, its arguments within it."""

from __future__ import annotations

import json
from collections.abc import Collection

from cog_triton.serving.openai.parsers.json_value import SPACE, JsonValue

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
