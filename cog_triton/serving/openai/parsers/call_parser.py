"""Parser of tool calls in a stream: what all formats have in common, and the deltas it gives.

Deltas are in the order of OpenAI's stream. A call is reported when its JSON is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from cog_triton.settings.request_defaults import RequestSettings
from cog_triton.text import client_json
from cog_triton.text.chat_template import template_variables
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.text.tool_schema import CallForm

_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_GAP = re.compile(r"[ \t\n\r]*[,:{]?[ \t\n\r]*")
_NAME = re.compile(r"[\w.-]{1,128}")
_ARGUMENTS = ("arguments", "parameters")
_decode = json.JSONDecoder().raw_decode


class Content(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer."""

    text: str


class CallStart(NamedTuple):
    """Start of tool call number `call`, counted from 0; its arguments follow."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of tool call `call`; all of them joined are a JSON object."""

    call: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` are a JSON object."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All deltas of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def join(deltas: Sequence[Delta]) -> Answer:
    """The answer that the deltas make."""
    calls: dict[int, tuple[str, list[str]]] = {}
    for delta in deltas:
        if isinstance(delta, CallStart):
            calls[delta.call] = delta.name, []
        elif isinstance(delta, CallArguments):
            calls[delta.call][1].append(delta.text)
    return Answer(
        "".join(delta.text for delta in deltas if isinstance(delta, Content)),
        "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        [Call(name, "".join(parts)) for name, parts in calls.values()],
    )


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind as one, so that a stream has fewer chunks."""
    groups = groupby(deltas, _kind)
    return [kind(*call, "".join(each[-1] for each in alike)) for (kind, call), alike in groups]


def _kind(delta: Delta) -> tuple[Callable[..., Delta], tuple[Any, ...]]:
    return type(delta), delta[:-1]


def plain(text: str) -> str:
    """JSON text with the control characters within its strings escaped, as models forget to."""
    return _QUOTED.sub(lambda string: string[0].translate(_CONTROLS), text)


def arguments_of(text: str) -> str:
    """The JSON object that `text` is, as `plain`; raises ValueError if it is none."""
    value = client_json.parse(text := plain(text.strip()))
    if not isinstance(value, dict):
        raise ValueError("arguments must be an object")
    json.dumps(value, ensure_ascii=False).encode()  # raises for what UTF-8 cannot have
    return text


def read_calls(text: str, tools: Collection[str] | None = None) -> list[tuple[str, str]]:
    """Names and arguments of a call, or of a list of calls; raises ValueError if one is none.

    A call is ``{"name": "f", "arguments": {}}``; Llama calls them ``parameters``. They may also be
    JSON within a string; without any, they are ``{}``. Other keys are ignored. With `tools`, a call
    is one of these, and has arguments.
    """
    value = client_json.parse(text := plain(text))
    found, place = [], 0
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            raise ValueError("a call must be an object")
        members, place = _members(text, text.index("{", place))
        name = item.get("name")
        key = next((key for key in _ARGUMENTS if item.get(key) not in (None, "")), None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError("a call must have a name")
        if tools is not None and (name not in tools or key is None):
            raise ValueError("not a call of a tool")
        given: Any = item.get(key) if key else "{}"
        found.append((name, arguments_of(given if isinstance(given, str) else members[str(key)])))
    return found


def _members(text: str, place: int) -> tuple[dict[str, str], int]:
    """The members of the valid object at `place`, each value as it is written; and its end."""
    members = {}
    while text[place := _gap(text, place)] != "}":
        key, place = _decode(text, place)
        start = _gap(text, place)
        _, place = _decode(text, start)
        members[key] = text[start:place]
    return members, place + 1


def _gap(text: str, place: int) -> int:
    """Where the next key or value begins, behind one separator; or where the object ends."""
    return next(_GAP.finditer(text, place)).end()


_PIECE = 1024
"""Characters taken at a time: what is left of a buffer is copied at each step."""
_MOST = 1 << 20
"""Characters of a call, or of a list of calls; what is longer is text."""
_OUTSIDE_STRINGS = frozenset(" \t\n\r,:+-.0123456789Eaeflnrstu")


class CallParser:
    """Parser that splits text into content and calls, however the text is cut.

    A call begins with an opening and the rest of its head. From there on its brackets and strings
    are followed, and it is read once, when its last bracket has closed. All else is content, as it
    was written.

    White space before the first content and behind a call is left out unless content follows it,
    between a call and its ending always.
    """

    openings: ClassVar[tuple[str, ...]] = ()
    """Texts at which content ends; a brace is part of the call itself."""
    head: ClassVar[re.Pattern[str]]
    """Text of a call before its JSON; the group `name` is the call's name."""
    open_head: ClassVar[re.Pattern[str]]
    """Text that more text may make a head."""
    endings: ClassVar[tuple[str, ...]] = ()
    """Texts that may follow a call, and are left out."""
    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that mark calls; tokenizers may have them as special tokens."""
    arguments_key: ClassVar[str] = "arguments"
    form: ClassVar[CallForm | None] = None
    """How calls are written, if a guide can tell them from text by that."""

    def __init__(self, tools: Collection[str]) -> None:
        self.completed = 0
        """How many calls there are."""
        self._tools = tools
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._space: list[str] = []
        """White space that is content only if content follows it."""
        self._quiet = True
        """Whether there was nothing but white space since the start, or since the last call."""
        self._behind = False
        """Whether the last call's JSON has just ended."""
        self._head, self._name = "", ""
        self._json: list[str] = []
        self._length = self._depth = 0
        self._quoted = self._escaped = False

    @property
    def ended(self) -> bool:
        """Whether nothing follows the last call."""
        return self.completed > 0 and self._quiet

    def feed(self, text: str) -> list[Delta]:
        """What this text completes."""
        for start in range(0, len(text), _PIECE):
            self._buffer += text[start : start + _PIECE]
            self._run(final=False)
        return self._drain()

    def finish(self) -> list[Delta]:
        """What was held back; call once, after the last text."""
        self._run(final=True)
        if self._json:
            self._reject()
        if not self.completed and self._space:
            self._deltas.append(Content("".join(self._space)))
        return self._drain()

    def _run(self, *, final: bool) -> None:
        """Take all from the buffer that needs no more text."""
        more = True
        while self._buffer and more:
            if self._json:
                self._in_call()
            else:
                more = self._behind_call(final) if self._behind else self._in_text(final)

    def _behind_call(self, final: bool) -> bool:
        """Leave out white space and the ending behind a call; False if that needs more text."""
        self._buffer = self._buffer.lstrip()
        ending = next((x for x in self.endings if x.startswith(self._buffer[: len(x)])), "")
        if not self._buffer or (len(self._buffer) < len(ending) and not final):
            return False
        self._take(len(ending))
        self._behind = False
        return True

    def _in_text(self, final: bool) -> bool:
        """Take content up to a call, and the call's head; likewise."""
        found = [(at, each) for each in self.openings if (at := self._buffer.find(each)) >= 0]
        if not found:
            held = 0 if final else max(open_length(self._buffer, each) for each in self.openings)
            self._say(self._take(len(self._buffer) - held))
            return False
        at, opening = min(found)
        self._say(self._take(at))
        begun = self._begin(final)
        if begun is False:
            self._say(self._take(len(opening)))
        return begun is not None

    def _begin(self, final: bool) -> bool | None:
        """Take the head of a call, and its first bracket; None if that needs more text."""
        if found := self.head.match(self._buffer):
            self._name = found.groupdict().get("name") or ""
            self._head = self._take(found.end())
            self._json, self._length, self._depth = [self._take(1)], 1, 1
            self._quoted = self._escaped = False
            return True
        return None if not final and self.open_head.fullmatch(self._buffer) else False

    def _in_call(self) -> None:
        """Take a call's JSON, up to its last bracket or before a character that JSON lacks."""
        length, valid = 0, True
        for char in self._buffer:
            length += 1
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            elif char not in _OUTSIDE_STRINGS:
                length, valid = length - 1, False
            if not (valid and self._depth):
                break
        self._length += length
        self._json.append(self._take(length))
        if not valid or self._length > _MOST:
            self._reject()
        elif not self._depth:
            self._close()

    def _close(self) -> None:
        """Report the calls of JSON that is complete."""
        try:
            calls = self._read("".join(self._json))
        except ValueError:
            calls = []
        if not calls:
            self._reject()
            return
        for name, arguments in calls:
            start = CallStart(self.completed, name)
            self._deltas += start, CallArguments(self.completed, arguments)
            self.completed += 1
        self._json, self._space = [], []
        self._behind = self._quiet = True

    def _read(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments of the calls of `text`; raises ValueError if it is none.

        Only what the format marks may be a call of a tool that the request does not have.
        """
        if self._name:
            return [(self._name, arguments_of(text))]
        return read_calls(text, None if self._head.strip() else self._tools)

    def _reject(self) -> None:
        """Give what looked like a call as content."""
        self._say("".join([self._head, *self._json]))
        self._json = []

    def _drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return merge(deltas)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _say(self, text: str) -> None:
        if self._quiet and text.isspace():
            self._space.append(text)
        elif text:
            self._deltas.append(Content("".join([*self._space, text])))
            self._space, self._quiet = [], False


def open_length(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the start of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


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
