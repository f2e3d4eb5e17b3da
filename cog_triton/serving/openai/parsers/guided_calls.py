"""Calls that guided decoding forced: a JSON list of calls, or the arguments of one function."""

from __future__ import annotations

from cog_triton.serving.openai.parsers.call_parser import CallParser


class RequiredCallsParser(CallParser):
    """Parser of ``[{"name": ..., "arguments": {...}}, ...]``; anything else is content."""

    _state = "start"

    def _step(self, *, final: bool) -> bool:
        if self._state == "object":
            if not self._read_object():
                return False
            self._state = "text" if self._broken else "between"
            return True
        if self._state == "text":
            self._say(self._take(len(self._buffer)))
            return False
        return self._list_mark("[" if self._state == "start" else ",]")

    def _list_mark(self, expected: str) -> bool:
        self._keep_space()
        if not self._buffer:
            return False
        mark = self._buffer[0]
        self._state = "object" if mark in expected and mark in "[," else "text"
        if mark in expected:
            self._candidate.append(self._take(1))
        if mark == "]":
            self._candidate = []
        elif mark not in expected:
            self._reject()
        return True


class NamedCallParser(CallParser):
    """Parser of the arguments of one call; what does not begin with a brace is content."""

    _state = "start"

    def _step(self, *, final: bool) -> bool:
        if self._state == "start":
            self._keep_space()
            if self._buffer[:1] == "{":
                (name,) = self._tools
                self._call(name)
                self._state = "arguments"
            elif self._buffer:
                self._reject()
                self._state = "text"
            return bool(self._buffer)
        if self._state == "arguments" and not self._read_arguments():
            return False
        self._state = "text"
        self._say(self._take(len(self._buffer)))
        return False
