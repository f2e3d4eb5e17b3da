"""Mistral: ``[TOOL_CALLS] [{"name": ..., "arguments": {}}]``, or ``[TOOL_CALLS]f[ARGS]{}``."""

from __future__ import annotations

import re

from cog_triton.serving.openai.parsers.call_parser import CallParser

_MARKER, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*")
_MOST_OF_A_HEAD = 256


class MistralParser(CallParser):
    """Parser of both forms: the newer one has a marker for each call, and may lack ``[ARGS]``."""

    markers = (_MARKER, _ID, _ARGS)
    _state = "text"

    def _step(self, *, final: bool) -> bool:
        match self._state:
            case "text":
                return self._text(final=final)
            case "form":
                return self._form()
            case "head":
                return self._head(final=final)
            case "arguments":
                return self._ended(self._read_arguments())
            case "object":
                return self._ended(self._read_object())
            case _:
                return self._between()

    def _text(self, *, final: bool) -> bool:
        marker = self._say_up_to(_MARKER, final=final)
        if marker is None:
            return False
        self._candidate.append(self._take(len(marker)))
        self._state = "form"
        return True

    def _form(self) -> bool:
        self._keep_space()
        if not self._buffer:
            return False
        self._state = "object" if self._buffer[0] in "[{" else "head"
        if self._buffer[0] == "[":
            self._candidate.append(self._take(1))
        return True

    def _head(self, *, final: bool) -> bool:
        end = self._buffer.find("{", 0, _MOST_OF_A_HEAD)
        if end < 0 and len(self._buffer) < _MOST_OF_A_HEAD and not final:
            return False
        head = _HEAD.fullmatch(self._buffer, 0, max(end, 0))
        if head and head[1] in self._tools:
            self._take(end)
            self._call(head[1])
            self._state = "arguments"
        else:
            self._reject()
            self._state = "text"
        return True

    def _ended(self, ended: bool) -> bool:
        if ended:
            self._state = "between" if self._state == "object" and not self._broken else "text"
        return ended

    def _between(self) -> bool:
        """Between the objects of a list."""
        self._skip_space()
        if not self._buffer:
            return False
        self._state = "object" if self._buffer[0] == "," else "text"
        if self._buffer[0] == ",":
            self._candidate.append(self._take(1))
        elif self._buffer[0] == "]":
            self._take(1)
        return True
