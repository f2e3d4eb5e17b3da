"""Llama 3: ``{"name": ..., "parameters": {...}}``, after ``<|python_tag|>`` or anywhere in text."""

from __future__ import annotations

from cog_triton.serving.openai.parsers.call_parser import CallParser

_TAG = "<|python_tag|>"


class Llama3JsonParser(CallParser):
    """Parser of calls that are plain JSON objects; a semicolon may separate them."""

    markers = (_TAG,)
    arguments_key = "parameters"
    _state = "text"

    def _step(self, *, final: bool) -> bool:
        if self._state == "text":
            return self._text(final=final)
        if self._state == "object":
            return self._ended()
        return self._separator()

    def _text(self, *, final: bool) -> bool:
        marker = self._say_up_to(_TAG, "{", final=final)
        if marker == _TAG:
            self._candidate.append(self._take(len(_TAG)))
        if marker is not None:
            self._state = "object"
        return marker is not None

    def _ended(self) -> bool:
        if not self._read_object():
            return False
        self._state = "text" if self._broken else "separator"
        return True

    def _separator(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        if self._buffer[0] == ";":
            self._take(1)
        self._state = "text"
        return True
