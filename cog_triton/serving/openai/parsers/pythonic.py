"""Pythonic: ``[f(a=1), g(b="x")]`` as the answer's start; Llama 3.2 and 4, LFM2, ToolACE."""

from __future__ import annotations

import json
import re

from cog_triton.serving.openai.parsers.call_parser import CallParser, open_length
from cog_triton.serving.openai.parsers.python_literals import NotCalls, parse_calls

_STARTS = ("<|python_start|>", "<|tool_call_start|>")
_ENDS = ("<|python_end|>", "<|tool_call_end|>")
_START = re.compile(r"\[\s*([A-Za-z_][\w.-]{0,63})\s*\(", re.ASCII)
_OPEN_START = re.compile(r"(?:\[\s{0,63}(?:[A-Za-z_][\w.-]{0,63}\s{0,63})?)?", re.ASCII)
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonicParser(CallParser):
    """Parser of a list of calls, given when it ends: at the start, or after a marker.

    All of a list are calls, or it is text.
    """

    markers = (*_STARTS, *_ENDS)
    _state = "start"

    def _step(self, *, final: bool) -> bool:
        match self._state:
            case "start":
                return self._start()
            case "text":
                return self._text(final=final)
            case "opening":
                return self._opening(final=final)
            case "list":
                return self._list()
            case _:
                return self._end(final=final)

    def _start(self) -> bool:
        self._keep_space()
        if self._buffer:
            self._state = "opening"
        return bool(self._buffer)

    def _text(self, *, final: bool) -> bool:
        marker = self._say_up_to(*_STARTS, final=final)
        if marker is None:
            return False
        self._candidate.append(self._take(len(marker)))
        self._state = "opening"
        return True

    def _opening(self, *, final: bool) -> bool:
        """Look at how the list begins: a bracket and the name of a tool."""
        self._keep_space()
        start = _START.match(self._buffer)
        if start is None and _OPEN_START.fullmatch(self._buffer) and not final:
            return False
        if start is None or start[1] not in self._tools:
            self._reject()
            self._state = "text"
        else:
            self._open: list[str] = []
            self._quote, self._escaped = "", False
            self._begin = len(self._candidate)
            self._state = "list"
        return True

    def _list(self) -> bool:
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
        text = "".join(self._candidate[self._begin :])
        try:
            calls = parse_calls(text)
        except NotCalls:
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls):
            self._reject()
            self._state = "text"
            return True
        for name, arguments in calls:
            self._call(name)
            self._argue(json.dumps(arguments, ensure_ascii=False))
        self.completed += len(calls)
        self._state = "end"
        return True

    def _end(self, *, final: bool) -> bool:
        self._skip_space()
        for marker in _ENDS:
            if self._buffer.startswith(marker):
                self._take(len(marker))
                break
            if open_length(self._buffer, marker) == len(self._buffer) and not final:
                return False
        self._state = "text"
        return True
