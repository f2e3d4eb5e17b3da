"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number."""

from __future__ import annotations

from cog_triton.serving.openai.parsers.call_parser import CallParser
from cog_triton.text.structural_tag import CallForm

_START, _END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Parser of calls between tags; the last closing tag may be missing."""

    markers = (_START, _END)
    form = CallForm(_START, f'{_START}\n{{"name": ', ', "arguments": ', f"}}\n{_END}")
    _state = "text"

    def _step(self, *, final: bool) -> bool:
        if self._state == "text":
            return self._text(final=final)
        if self._state == "object":
            return self._ended()
        return self._end_tag(final=final)

    def _text(self, *, final: bool) -> bool:
        marker = self._say_up_to(_START, final=final)
        if marker is None:
            return False
        self._candidate.append(self._take(len(marker)))
        self._state = "object"
        return True

    def _ended(self) -> bool:
        if not self._read_object():
            return False
        self._state = "text" if self._broken else "end"
        return True

    def _end_tag(self, *, final: bool) -> bool:
        self._skip_space()
        if self._buffer.startswith(_END):
            self._take(len(_END))
        elif _END.startswith(self._buffer) and not final:
            return False
        self._state = "text"
        return True
