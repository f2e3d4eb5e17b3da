"""Choice of the parsers of a model's answers, and those of calls in JSON: Hermes (Qwen), Llama 3.

Chosen by setting, or by what the model's chat template contains.
"""

from __future__ import annotations

from collections.abc import Mapping

from cog_triton.serving.openai.parsers.call_parser import CallParser
from cog_triton.serving.openai.parsers.mistral import MistralParser
from cog_triton.serving.openai.parsers.pythonic import PythonicParser
from cog_triton.settings.request_defaults import RequestSettings
from cog_triton.text.structural_tag import CallForm
from cog_triton.text.template_process import template_variables
from cog_triton.text.tokenizer import EngineTokenizer

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
