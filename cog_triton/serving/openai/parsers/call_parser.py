"""Incremental parser of tool calls: what all formats have in common, and the deltas it gives.

Deltas are in the order of OpenAI's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, NamedTuple

from cog_triton.serving.openai.parsers.call_object import SPACE, CallObject, JsonValue
from cog_triton.text.tool_schema import CallForm


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
    """A tool call; `arguments` are a JSON object, cut off if the answer was."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All deltas of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def join(deltas: Iterable[Delta]) -> Answer:
    """The answer that the deltas make."""
    content, reasoning = [], []
    calls: list[tuple[str, list[str]]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(_, name):
                calls.append((name, []))
            case CallArguments(call, text):
                calls[call][1].append(text)
    made = [Call(name, "".join(parts)) for name, parts in calls]
    return Answer("".join(content), "".join(reasoning), made)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind as one, so that a stream has fewer chunks."""
    merged: list[Delta] = []
    for _, group in groupby(deltas, _kind):
        alike = list(group)
        first = alike[0]
        if isinstance(first, CallStart) or len(alike) == 1:
            merged += alike
        else:
            texts = [delta.text for delta in alike if not isinstance(delta, CallStart)]
            merged.append(first._replace(text="".join(texts)))
    return merged


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    return type(delta), delta.call if isinstance(delta, CallStart | CallArguments) else -1


_PIECE = 1024
"""Characters taken at a time: what is left of a buffer is copied at each step."""


class CallParser:
    """Parser that splits text into content and calls of `tools`, however the text is cut.

    A format says what opens a call and what may follow it, and has states of its own; a state
    takes something from the buffer, and returns False if that needs more text.

    What is no call of one of the tools in the format is content, markers included. White space
    before the first content, and after a call, is left out unless content follows it.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """What the format marks calls with; tokenizers may have these as special tokens."""
    openings: ClassVar[tuple[str, ...]] = ()
    """What content ends at; a brace is part of the call itself."""
    endings: ClassVar[tuple[str, ...]] = ()
    """What may follow a call, and is left out."""
    arguments_key: ClassVar[str] = "arguments"
    form: ClassVar[CallForm | None] = None
    """How calls are written, where that tells them from text and their arguments are JSON."""

    def __init__(self, tools: Collection[str]) -> None:
        self.completed = 0
        """How many calls have all their arguments."""
        self._tools = tools
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._calls = 0
        self._held: list[str] = []
        self._quiet = True
        self._candidate: list[str] = []
        self._object: CallObject | None = None
        self._arguments: JsonValue | None = None
        self._state: Callable[[bool], bool] = self._begin

    def feed(self, text: str) -> list[Delta]:
        """What this text completes."""
        found: list[Delta] = []
        for start in range(0, len(text), _PIECE):
            self._buffer += text[start : start + _PIECE]
            found += self._run(final=False)
        return merge(found)

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What was held back; call once, after the last text.

        What has begun as a call, and was `cut` by the limit of tokens before anything could be told
        of it, is dropped: it is the format's, and no text for anybody.
        """
        deltas = self._run(final=not cut)
        if self._arguments or (self._object is not None and self._object.in_arguments):
            self._argue(self._buffer)
        elif not self._is_unfinished(cut=cut):
            self._say("".join(self._candidate) + self._buffer)
        if not self._calls and self._held:
            self._deltas.append(Content("".join(self._held)))
        return merge([*deltas, *self._drain()])

    def _is_unfinished(self, *, cut: bool) -> bool:
        """Whether what is left is of a call that has not become one."""
        return cut and bool(self._candidate) and self._candidate[0] in self.openings

    def _begin(self, final: bool) -> bool:
        """State at the start of the answer."""
        self._state = self._in_text
        return True

    def _in_text(self, final: bool) -> bool:
        """State within content: it goes up to what opens a call."""
        opening = self._say_up_to(*self.openings, final=final)
        if opening is None:
            return False
        if opening != "{":
            self._candidate.append(self._take(len(opening)))
        self._state = self._opened
        return True

    def _opened(self, final: bool) -> bool:
        """State after what opens a call."""
        self._state = self._in_object
        return True

    def _after_call(self, final: bool) -> bool:
        """State after a call's object."""
        self._skip_space()
        for ending in self.endings:
            if self._buffer.startswith(ending):
                self._take(len(ending))
                break
            if open_length(self._buffer, ending) == len(self._buffer) and not final:
                return False
        self._state = self._in_text
        return True

    def _run(self, *, final: bool) -> list[Delta]:
        while self._buffer and self._state(final):
            pass
        return merge(self._drain())

    def _drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _say(self, text: str) -> None:
        """Give content."""
        if not text:
            return
        if self._quiet and text.isspace():
            self._held.append(text)
            return
        self._deltas.append(Content("".join([*self._held, text])))
        self._held, self._quiet = [], False

    def _call(self, name: str) -> None:
        """Start a call."""
        self._deltas.append(CallStart(self._calls, name))
        self._calls += 1
        self._candidate = []
        self._held, self._quiet = [], True

    def _argue(self, text: str) -> None:
        """Give arguments of the last call."""
        if text:
            self._deltas.append(CallArguments(self._calls - 1, text))

    def _say_up_to(self, *markers: str, final: bool) -> str | None:
        """Give content up to the first of `markers`, and return it, which the buffer starts with.

        Without one, its possible start at the end of the buffer is held back.
        """
        found = [(at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._say(self._take(at))
            return marker
        longest = 0 if final else max(open_length(self._buffer, marker) for marker in markers)
        self._say(self._take(len(self._buffer) - longest))
        return None

    def _in_object(self, final: bool) -> bool:
        """State within a call's object; what turns out to be none is content."""
        call = self._object = self._object or CallObject(self._tools)
        known, complete = call.name, call.complete
        count, arguments = call.take(self._buffer)
        taken = self._take(count)
        if call.name is None:
            self._candidate.append(taken)
        elif known is None:
            self._call(call.name)
        self._argue(arguments)
        self.completed += call.complete and not complete
        if not (call.done or call.broken):
            return False
        self._object = None
        if call.broken:
            self._reject()
        else:
            self._state = self._after_call
        return True

    def _in_arguments(self, final: bool) -> bool:
        """State within arguments alone, of the call that was started."""
        value = self._arguments = self._arguments or JsonValue()
        self._argue(self._take(value.take(self._buffer)))
        if not (value.done or value.broken):
            return False
        self.completed += value.done
        self._arguments = None
        self._state = self._in_text
        return True

    def _reject(self) -> None:
        """Give what looked like a call as content."""
        rejected, self._candidate = "".join(self._candidate), []
        self._say(rejected)
        self._state = self._in_text

    def _skip_space(self) -> None:
        self._buffer = self._buffer.lstrip(SPACE)

    def _keep_space(self) -> None:
        """Take white space as part of what may become a call."""
        self._candidate.append(self._take(len(self._buffer) - len(self._buffer.lstrip(SPACE))))


def open_length(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the start of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
