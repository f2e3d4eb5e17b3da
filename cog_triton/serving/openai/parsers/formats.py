"""Formats of tool calls in JSON, and the choice of a model's: of its calls, and its reasoning.

Chosen by setting, or by what the model's chat template contains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cog_triton.serving.openai.parsers.call_parser import CallParser
from cog_triton.serving.openai.parsers.pythonic import PythonicParser
from cog_triton.settings.request_defaults import RequestSettings
from cog_triton.text.structural_tag import CallForm
from cog_triton.text.template_process import template_variables
from cog_triton.text.tokenizer import EngineTokenizer

_TAG = "<|python_tag|>"
_START, _END = "<tool_call>", "</tool_call>"
_MARKER, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*")
_MOST_OF_A_HEAD = 256


class Llama3JsonParser(CallParser):
    """Parser of calls that are plain JSON objects; a semicolon may separate them."""

    markers = (_TAG,)
    openings = (_TAG, "{")
    endings = (";",)
    arguments_key = "parameters"


class HermesParser(CallParser):
    """Parser of calls between tags, also of Qwen; the last closing tag may be missing."""

    markers = (_START, _END)
    openings = (_START,)
    endings = (_END,)
    form = CallForm(_START, f'{_START}\n{{"name": ', ', "arguments": ', f"}}\n{_END}")


class MistralParser(CallParser):
    """Parser of ``[TOOL_CALLS] [{"name": ..., "arguments": {}}]``, or ``[TOOL_CALLS]f[ARGS]{}``.

    The second, newer form has a marker for each call, and may lack ``[ARGS]``.
    """

    markers = (_MARKER, _ID, _ARGS)
    openings = (_MARKER,)

    def _opened(self, final: bool) -> bool:
        self._keep_space()
        if not self._buffer:
            return False
        self._state = self._in_object if self._buffer[0] in "[{" else self._head
        if self._buffer[0] == "[":
            self._candidate.append(self._take(1))
        return True

    def _head(self, final: bool) -> bool:
        end = self._buffer.find("{", 0, _MOST_OF_A_HEAD)
        if end < 0 and len(self._buffer) < _MOST_OF_A_HEAD and not final:
            return False
        head = _HEAD.fullmatch(self._buffer, 0, max(end, 0))
        if head and head[1] in self._tools:
            self._take(end)
            self._call(head[1])
            self._state = self._in_arguments
        else:
            self._reject()
        return True

    def _after_call(self, final: bool) -> bool:
        """Between the objects of a list."""
        self._skip_space()
        if not self._buffer:
            return False
        self._state = self._in_object if self._buffer[0] == "," else self._in_text
        if self._buffer[0] == ",":
            self._candidate.append(self._take(1))
        elif self._buffer[0] == "]":
            self._take(1)
        return True


class _ForcedCallParser(CallParser):
    """Parser of calls that the answer was guided to; what follows them is content."""

    def _in_text(self, final: bool) -> bool:
        """See `CallParser._in_text`: nothing opens another call."""
        self._say(self._take(len(self._buffer)))
        return False


class RequiredCallsParser(_ForcedCallParser):
    """Parser of ``[{"name": ..., "arguments": {...}}, ...]``; anything else is content."""

    def _begin(self, final: bool) -> bool:
        return self._list_mark("[")

    def _after_call(self, final: bool) -> bool:
        return self._list_mark(",]")

    def _list_mark(self, expected: str) -> bool:
        self._keep_space()
        if not self._buffer:
            return False
        mark = self._buffer[0]
        if mark not in expected:
            self._reject()
            return True
        self._candidate.append(self._take(1))
        self._state = self._in_object
        if mark == "]":
            self._candidate, self._state = [], self._in_text
        return True


class NamedCallParser(_ForcedCallParser):
    """Parser of the arguments of one call; what does not begin with a brace is content."""

    def _begin(self, final: bool) -> bool:
        self._keep_space()
        if self._buffer[:1] == "{":
            (name,) = self._tools
            self._call(name)
            self._state = self._in_arguments
        elif self._buffer:
            self._reject()
        return bool(self._buffer)


CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
REASONING_MARKERS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
# What is like Hermes' format, and has no JSON within the tags: Qwen3-Coder, GLM.
_NOT_HERMES = ("<function=", "<arg_key>")
_FOUND_BY = {
    "mistral": ("[TOOL_CALLS]",),
    "hermes": ("<tool_call>",),
    "llama3_json": ("<|python_tag|>", '"parameters": dictionary'),
    "pythonic": ("func_name1(", "<|python_start|>", "<|tool_call_start|>", "<|tool_list_start|>"),
}


def call_parser(settings: RequestSettings, tokenizer: EngineTokenizer) -> str | None:
    """Name of the parser of tool calls: TOOL_CALL_PARSER, or what the template teaches."""
    if settings.tool_call_parser != "auto":
        return None if settings.tool_call_parser == "none" else settings.tool_call_parser
    template = tokenizer.template_for(tools=True) or ""
    if "tools" not in template_variables(template):
        return None
    for name, marks in _FOUND_BY.items():
        if _has_any(template, marks):
            return None if name == "hermes" and _has_any(template, _NOT_HERMES) else name
    return None


def reasoning_parser(settings: RequestSettings, tokenizer: EngineTokenizer) -> str | None:
    """Name of the parser of reasoning: REASONING_PARSER, or what the template knows."""
    if settings.reasoning_parser != "auto":
        return None if settings.reasoning_parser == "none" else settings.reasoning_parser
    template = tokenizer.template_for(tools=False) or ""
    found = (name for name, (_, closing) in REASONING_MARKERS.items() if closing in template)
    return next(found, None)


def _has_any(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)
