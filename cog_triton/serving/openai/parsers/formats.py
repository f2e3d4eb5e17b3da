"""Formats of tool calls, and the choice of a model's: of its calls, and its reasoning.

Chosen by setting, or by what the model's chat template contains. The pythonic one is
``[f(a=1), g(b="x")]`` as the answer's start (Llama 3.2 and 4, LFM2, ToolACE), parsed without
Python's compiler, which warns about escapes that models write, and takes far more than literals.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from cog_triton.serving.openai.parsers.call_object import arguments_of
from cog_triton.serving.openai.parsers.call_parser import CallParser
from cog_triton.settings.request_defaults import PREFIX, RequestSettings
from cog_triton.text.chat_template import template_variables
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.text.tool_schema import CallForm

_STARTS = ("<|python_start|>", "<|tool_call_start|>")
_ENDS = ("<|python_end|>", "<|tool_call_end|>")
_LIST_START = re.compile(r"\[\s*([A-Za-z_][\w.-]{0,127})\s*\(", re.ASCII)
_OPEN_LIST_START = re.compile(r"(?:\[\s{0,63}(?:[A-Za-z_][\w.-]{0,127}\s{0,63})?)?", re.ASCII)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_KEYWORD = re.compile(r"[^\W\d]\w*")
_STRING = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5})|(.))", re.DOTALL
)
_SPELLED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_DEPTH = 64
_MOST_DIGITS = 300

Calls = list[tuple[str, dict[str, Any]]]


class NotCalls(ValueError):
    """The text is not a list of calls."""


class PythonicParser(CallParser):
    """Parser of a list of calls, given when it ends: at the start, or after a marker.

    All of a list are calls, or it is text.
    """

    markers = (*_STARTS, *_ENDS)
    openings = _STARTS
    endings = _ENDS
    quotes = "'\""
    outside = None

    def _begin(self, final: bool) -> bool:
        """See `CallParser._begin`: a list may begin at once."""
        return self._opened(final)

    def _opened(self, final: bool) -> bool:
        """Look at how the list begins: a bracket and the name of a tool."""
        self._keep_space()
        start = _LIST_START.match(self._buffer)
        if start is None and _OPEN_LIST_START.fullmatch(self._buffer) and not final:
            return False
        if start is None or start[1] not in self._tools:
            self._reject()
        else:
            self._start_call()
        return True

    def _read(self, text: str) -> list[tuple[str, str]]:
        calls = parse_calls(text)
        if any(name not in self._tools for name, _ in calls):
            raise NotCalls
        return [
            (name, arguments_of(json.dumps(given, ensure_ascii=False))) for name, given in calls
        ]


def parse_calls(text: str) -> Calls:
    """Names and keyword arguments of a list of calls; raises NotCalls."""
    reader = _Reader(text)
    calls = reader.items("[", "]", reader.call)
    reader.skip_space()
    if not calls or reader.place != len(text):
        raise NotCalls
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self.place = 0

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self._match(_NAME)[0]
        arguments = dict(pairs := self.items("(", ")", self._keyword))
        if len(arguments) < len(pairs):
            raise NotCalls
        return name, arguments

    def items(self, opening: str, closing: str, read: Any) -> list[Any]:
        """What `read` gives for each of the items, which commas separate."""
        self._depth += 1
        if self._depth > _MAX_DEPTH or not self._skip(opening):
            raise NotCalls
        found = []
        while not self._skip(closing):
            found.append(read())
            if not self._skip(",") and not self._sees(closing):
                raise NotCalls
        self._depth -= 1
        return found

    def _keyword(self) -> tuple[str, Any]:
        self.skip_space()
        name = self._match(_KEYWORD)[0]
        if not self._skip("="):
            raise NotCalls
        return name, self._value()

    def _entry(self) -> tuple[str, Any]:
        key = self._value()
        if not isinstance(key, str) or not self._skip(":"):
            raise NotCalls
        return key, self._value()

    def _value(self) -> Any:
        self.skip_space()
        char = self._text[self.place : self.place + 1]
        if char == "[":
            return self.items("[", "]", self._value)
        if char == "(":
            return self.items("(", ")", self._value)
        if char == "{":
            return dict(self.items("{", "}", self._entry))
        if char in ("'", '"'):
            string = self._match(_STRING)
            return _ESCAPE.sub(_unescaped, string[1] if string[1] is not None else string[2])
        if char.isalpha():
            word = self._match(_KEYWORD)[0]
            if word in _WORDS:
                return _WORDS[word]
            raise NotCalls
        return _number(self._match(_NUMBER)[0])

    def skip_space(self) -> None:
        self._match(_SPACE)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self.place)
        if found is None:
            raise NotCalls
        self.place = found.end()
        return found

    def _sees(self, char: str) -> bool:
        self.skip_space()
        return self._text.startswith(char, self.place)

    def _skip(self, char: str) -> bool:
        seen = self._sees(char)
        self.place += seen
        return seen


def _number(text: str) -> int | float:
    if len(text) > _MOST_DIGITS:
        raise NotCalls
    if not set(text) & set(".eE"):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise NotCalls
    return value


def _unescaped(escape: re.Match[str]) -> str:
    if digits := escape[1] or escape[2] or escape[3]:
        return chr(int(digits, 16))
    return _SPELLED.get(escape[4], escape[4] if escape[4] in "\\'\"" else escape[0])


_TAG = "<|python_tag|>"
_START, _END = "<tool_call>", "</tool_call>"
_MARKER, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"\s*([\w.-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*")
_MOST_OF_A_HEAD = 256
_BARE = re.compile(r'\{\s{0,64}"(?:name|parameters|arguments|type|id)"')
_MOST_OF_A_KEY = 80


class Llama3JsonParser(CallParser):
    """Parser of calls that are plain JSON objects; a semicolon may separate them."""

    markers = (_TAG,)
    openings = (_TAG, "{")
    endings = (";",)
    arguments_key = "parameters"

    def _opened(self, final: bool) -> bool:
        """See `CallParser._opened`: other JSON is content from its first key on."""
        text = self._buffer[:_MOST_OF_A_KEY]
        if self._candidate or _BARE.match(text):
            return super()._opened(final)
        if text.count('"') < 2 and len(text) < _MOST_OF_A_KEY and not final:
            return False
        self._candidate.append(self._take(1))
        self._reject()
        return True


class HermesParser(CallParser):
    """Parser of calls between tags, also of Qwen; the last closing tag may be missing."""

    markers = (_START, _END)
    openings = (_START,)
    endings = (_END,)
    ends = True
    form = CallForm(_START, f'{_START}\n{{"name": ', ', "arguments": ', f"}}\n{_END}")


class MistralParser(CallParser):
    """Parser of ``[TOOL_CALLS] [{"name": ..., "arguments": {}}]``, or ``[TOOL_CALLS]f[ARGS]{}``.

    The second, newer form has a marker for each call, and may lack ``[ARGS]``.
    """

    markers = (_MARKER, _ID, _ARGS)
    openings = (_MARKER,)
    starts = "[{"

    def _opened(self, final: bool) -> bool:
        self._name = ""
        self._keep_space()
        if self._buffer[:1] in ("", *self.starts):
            return super()._opened(final)
        end = self._buffer.find("{", 0, _MOST_OF_A_HEAD)
        if end < 0 and len(self._buffer) < _MOST_OF_A_HEAD and not final:
            return False
        if head := _HEAD.fullmatch(self._buffer, 0, max(end, 0)):
            self._name = head[1]
            self._candidate.append(self._take(end))
            self._start_call()
        else:
            self._reject()
        return True

    def _read(self, text: str) -> list[tuple[str, str]]:
        return [(self._name, arguments_of(text))] if self._name else super()._read(text)


class _ForcedCallParser(CallParser):
    """Parser of calls that the answer was guided to; what follows them is content."""

    def _begin(self, final: bool) -> bool:
        return self._opened(final)

    def _in_text(self, final: bool) -> bool:
        """See `CallParser._in_text`: nothing opens another call."""
        self._say(self._take(len(self._buffer)))
        return False


class RequiredCallsParser(_ForcedCallParser):
    """Parser of ``[{"name": ..., "arguments": {...}}, ...]``; anything else is content."""

    starts = "["


class NamedCallParser(_ForcedCallParser):
    """Parser of the arguments of one call; anything else is content."""

    def _read(self, text: str) -> list[tuple[str, str]]:
        (name,) = self._tools
        return [(name, arguments_of(text))]


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
        return _ours(settings.tool_call_parser)
    template = tokenizer.template_for(tools=True) or ""
    if "tools" not in template_variables(template):
        return None
    for name, marks in _FOUND_BY.items():
        if _has_any(template, marks):
            return None if name == "hermes" and _has_any(template, _NOT_HERMES) else name
    return None


def is_unknown(settings: RequestSettings, tokenizer: EngineTokenizer) -> bool:
    """Whether the template knows of tools, and no format of ours."""
    template = tokenizer.template_for(tools=True) or ""
    unknown = settings.tool_call_parser == "auto" and call_parser(settings, tokenizer) is None
    return unknown and "tools" in template_variables(template)


def reasoning_parser(settings: RequestSettings, tokenizer: EngineTokenizer) -> str | None:
    """Name of the parser of reasoning: REASONING_PARSER, or what the template knows."""
    if settings.reasoning_parser != "auto":
        return _ours(settings.reasoning_parser)
    template = tokenizer.template_for(tools=False) or ""
    found = (name for name, (_, closing) in REASONING_MARKERS.items() if closing in template)
    return next(found, None)


def _ours(name: str) -> str | None:
    """A parser's name, None for none of ours."""
    return None if name == "none" or name.startswith(PREFIX) else name


def _has_any(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)
