"""Formats of tool calls, and the choice of a model's: of its calls, and its reasoning.

Chosen by setting, or by what the model's chat template contains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cog_triton.serving.openai.parsers.call_parser import CallParser, arguments_of
from cog_triton.settings.request_defaults import RequestSettings
from cog_triton.text.chat_template import template_variables
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.text.tool_schema import CallForm

PYTHONIC, UNKNOWN = "pythonic", "unknown"
"""Formats that are not ours: what vLLM's parser of that name reads, and any other."""
_START, _END = "<tool_call>", "</tool_call>"
_HERMES = re.compile(r"<tool_call>\s{0,64}(?=\{)")
_OPEN_HERMES = re.compile(r"<tool_call>\s{0,64}")
_TAG = "<|python_tag|>"
_LLAMA = re.compile(
    r'<\|python_tag\|>\s{0,64}(?=\{)|(?=\{\s{0,64}"(?:name|parameters|arguments|type|id)")'
)
_OPEN_LLAMA = re.compile(r'<\|python_tag\|>\s{0,64}|\{\s{0,64}(?:"[a-z]{0,10})?')
_MARKER, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL = re.compile(
    r"\[TOOL_CALLS\]\s{0,64}(?:(?=[\[{])"
    r"|(?P<name>[\w.-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,64}(?=\{))"
)
_OPEN_MISTRAL = re.compile(r"\[TOOL_CALLS\][^{]{0,256}")
_LIST = re.compile(r"\s{0,64}(?=\[)")
_OBJECT = re.compile(r"\s{0,64}(?=\{)")
_OPEN_FORCED = re.compile(r"\s{0,64}")


class HermesParser(CallParser):
    """Parser of calls between tags, also of Qwen; a closing tag may be missing."""

    openings = (_START,)
    head, open_head = _HERMES, _OPEN_HERMES
    endings = (_END,)
    markers = (_START, _END)
    form = CallForm(_START, f'{_START}\n{{"name": ', ', "arguments": ', f"}}\n{_END}")


class Llama3JsonParser(CallParser):
    """Parser of calls that are plain JSON objects; a semicolon may separate them."""

    openings = (_TAG, "{")
    head, open_head = _LLAMA, _OPEN_LLAMA
    endings = (";",)
    markers = (_TAG,)
    arguments_key = "parameters"


class MistralParser(CallParser):
    """Parser of ``[TOOL_CALLS] [{"name": ..., "arguments": {}}]``, or ``[TOOL_CALLS]f[ARGS]{}``.

    The second, newer form has a marker for each call, and may lack ``[ARGS]``.
    """

    openings = (_MARKER,)
    head, open_head = _MISTRAL, _OPEN_MISTRAL
    markers = (_MARKER, _ID, _ARGS)


class _ForcedCallParser(CallParser):
    """Parser of calls that the answer was guided to, and begins with; all else is content."""

    open_head = _OPEN_FORCED

    def _in_text(self, final: bool) -> bool:
        begun = self._begin(final) if self._quiet and not self.completed else False
        if begun is False:
            self._say(self._take(len(self._buffer)))
        return begun is True


class RequiredCallsParser(_ForcedCallParser):
    """Parser of ``[{"name": ..., "arguments": {...}}, ...]``."""

    head = _LIST


class NamedCallParser(_ForcedCallParser):
    """Parser of the arguments of one call."""

    head = _OBJECT

    def _read(self, text: str) -> list[tuple[str, str]]:
        (name,) = self._tools
        return [(name, arguments_of(text))]


CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
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
    PYTHONIC: ("func_name1(", "<|python_start|>", "<|tool_call_start|>", "<|tool_list_start|>"),
}


def format_of(tokenizer: EngineTokenizer) -> str | None:
    """Format of calls that the chat template teaches; None if it knows of no tools."""
    template = tokenizer.template_for(tools=True) or ""
    if "tools" not in template_variables(template):
        return None
    for name, marks in _FOUND_BY.items():
        if any(mark in template for mark in marks):
            other = name == "hermes" and any(mark in template for mark in _NOT_HERMES)
            return UNKNOWN if other else name
    return UNKNOWN


def call_parser(settings: RequestSettings, tokenizer: EngineTokenizer) -> str | None:
    """Name of our parser of tool calls: TOOL_CALL_PARSER, or what the template teaches."""
    name = settings.tool_call_parser
    found = format_of(tokenizer) if name == "auto" else name
    return found if found in CALL_PARSERS else None


def reasoning_parser(settings: RequestSettings, tokenizer: EngineTokenizer) -> str | None:
    """Name of our parser of reasoning: REASONING_PARSER, or what the template knows."""
    if settings.reasoning_parser != "auto":
        name = settings.reasoning_parser
        return name if name in REASONING_MARKERS else None
    template = tokenizer.template_for(tools=False) or ""
    found = (name for name, (_, closing) in REASONING_MARKERS.items() if closing in template)
    return next(found, None)
