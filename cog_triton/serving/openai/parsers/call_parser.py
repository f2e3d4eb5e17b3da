"""Parser of tool calls in a stream: what all formats have in common, and the deltas it gives.

Deltas are in the order of OpenAI's stream. A call is reported when all of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, NamedTuple

from cog_triton.serving.openai.parsers.call_object import read_calls
from cog_triton.text.client_json import MAX_DEPTH
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
    """A tool call; `arguments` are a JSON object."""

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
_MOST = 1 << 20
"""Characters of a call, or of a list of calls; what is longer is text."""
_SPACE = " \t\n\r"
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class CallParser:
    """Parser that splits text into content and calls, however the text is cut.

    A format says what opens a call and what may follow it, and has states of its own; a state
    takes something from the buffer, and returns False if that needs more text. From its opening
    on, what may become a call is a candidate; it is read once its last bracket has closed.

    What is no call in the format is content, markers included. White space before the first
    content, and behind a call and its ending, is left out unless content follows it.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """What the format marks calls with; tokenizers may have these as special tokens."""
    openings: ClassVar[tuple[str, ...]] = ()
    """What content ends at; a brace is part of the call itself."""
    endings: ClassVar[tuple[str, ...]] = ()
    """What may follow a call, and is left out."""
    ends: ClassVar[bool] = False
    """Whether only an ending, an opening or the end of the answer may follow a call."""
    starts: ClassVar[str] = "{"
    """Brackets that calls begin with, after what opens them."""
    quotes: ClassVar[str] = '"'
    outside: ClassVar[Collection[str] | None] = frozenset(" \t\n\r,:+-.0123456789Eaeflnrstu")
    """Characters outside strings, besides brackets: those of JSON. None for any."""
    arguments_key: ClassVar[str] = "arguments"
    form: ClassVar[CallForm | None] = None
    """How calls are written, where that tells them from text and their arguments are JSON."""

    def __init__(self, tools: Collection[str]) -> None:
        self.completed = 0
        """How many calls there are."""
        self._tools = tools
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._held: list[str] = []
        self._quiet = True
        self._candidate: list[str] = []
        self._found: Sequence[tuple[str, str]] = ()
        self._state: Callable[[bool], bool] = self._begin

    @property
    def ended(self) -> bool:
        """Whether nothing follows the last call."""
        return self.completed > 0 and self._quiet

    def feed(self, text: str) -> list[Delta]:
        """What this text completes."""
        found: list[Delta] = []
        for start in range(0, len(text), _PIECE):
            self._buffer += text[start : start + _PIECE]
            found += self._run(final=False)
        return merge(found)

    def finish(self) -> list[Delta]:
        """What was held back; call once, after the last text."""
        deltas = self._run(final=True)
        if self._found:
            self._report()
        self._say("".join(self._candidate) + self._buffer)
        if not self.completed and self._held:
            self._deltas.append(Content("".join(self._held)))
        return merge([*deltas, *self._drain()])

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
        self._keep_space()
        if self._buffer and self._buffer[0] in self.starts:
            self._start_call()
        elif self._buffer:
            self._reject()
        return True

    def _start_call(self) -> None:
        """Go on to the text of a call, which the buffer starts with."""
        self._start, self._length = len(self._candidate), 0
        self._open: list[str] = []
        self._quote, self._escaped = "", False
        self._state = self._in_call

    def _in_call(self, final: bool) -> bool:
        """State within a call's text, up to the bracket that closes it."""
        place = 0
        for place, char in enumerate(self._buffer, 1):
            if not self._follow(char):
                self._candidate.append(self._take(place - 1))
                self._reject()
                return True
            if not self._open:
                break
        self._length += place
        self._candidate.append(self._take(place))
        if not self._open:
            self._close()
        elif self._length > _MOST:
            self._reject()
        return True

    def _follow(self, char: str) -> bool:
        """Follow strings and brackets; False for what cannot be in a call."""
        if self._quote:
            ends = char == self._quote and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._quote = "" if ends else self._quote
        elif char in self.quotes:
            self._quote = char
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
            return len(self._open) <= MAX_DEPTH
        elif char in _CLOSING.values():
            return self._open.pop() == char
        else:
            return self.outside is None or char in self.outside
        return True

    def _close(self) -> None:
        """Read the calls of the candidate, which are calls if what follows does not deny it."""
        try:
            self._found = self._read("".join(self._candidate[self._start :]))
        except ValueError:
            self._found = ()
        self._state = self._behind
        if not self._found:
            self._reject()

    def _read(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments of the calls of `text`; raises ValueError if it is none.

        Only what the format marks may be a call of a tool that the request does not have.
        """
        marked = self._candidate[0] in self.openings
        return read_calls(text, None if marked else self._tools)

    def _behind(self, final: bool) -> bool:
        """State behind calls, whose last bracket may be one too many."""
        self._keep_space()
        text = self._buffer
        if not text:
            return False
        marks = (*self.endings, *self.openings)
        if not final and any(open_length(text, mark) == len(text) for mark in marks):
            return False
        ended = (end for end in self.endings if text.startswith(end) or end.startswith(text))
        ending = next(ended, None)
        other = self.ends and not text.startswith(self.openings)
        if ending is None and (other or text[0] in "}])"):
            self._found = ()
            self._reject()
        else:
            self._take(len(ending or ""))
            self._report()
        return True

    def _report(self) -> None:
        """Give the calls that were found."""
        for name, arguments in self._found:
            self._deltas += (
                CallStart(self.completed, name),
                CallArguments(self.completed, arguments),
            )
            self.completed += 1
        self._found, self._candidate = (), []
        self._held, self._quiet = [], True
        self._state = self._in_text

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
        if not text:
            return
        if self._quiet and text.isspace():
            self._held.append(text)
            return
        self._deltas.append(Content("".join([*self._held, text])))
        self._held, self._quiet = [], False

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

    def _reject(self) -> None:
        """Give what looked like a call as content."""
        rejected, self._candidate = "".join(self._candidate), []
        self._say(rejected)
        self._state = self._in_text

    def _keep_space(self) -> None:
        """Take white space as part of what may become a call."""
        self._candidate.append(self._take(len(self._buffer) - len(self._buffer.lstrip(_SPACE))))


def open_length(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the start of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
