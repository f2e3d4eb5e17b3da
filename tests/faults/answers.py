"""Answers of the four kinds of clients, compared with the text that is known beforehand."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cog_triton import errors
from cog_triton.text.sse import EventSplitter, event_data

COMPLETE, WRONG, CUT, HUNG, UNCODED, LEFT = (
    *("complete", "wrong text", "cut off", "hung", "without a code", "left"),
)
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the length of its answer in tokens, and the greedy text of so many."""

    prompt: str
    tokens: int
    text: str


class Answer(ABC):
    """One answer (`ResponseSink`); times are seconds of the monotonic clock.

    `reads` has each read that brought text, of streams; `error` the text of an error, and `broken`
    how the connection ended too early.
    """

    path: ClassVar[str]
    streamed: ClassVar[bool]

    def __init__(self, question: Question, sent: float) -> None:
        self.question = question
        self.sent = sent
        self.ended: float | None = None
        self.reads: list[float] = []
        self.text = ""
        self.told: int | None = None
        self.error: str | None = None
        self.broken: str | None = None
        self._status = 0
        self._body = b""
        self._splitter = EventSplitter()

    @abstractmethod
    def request(self, model: str) -> dict[str, Any]:
        """The body to send."""

    @abstractmethod
    def take(self, data: Mapping[str, Any]) -> None:
        """Take an event's data, or the whole body."""

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `ResponseSink.begin`."""
        self._status = status

    def body(self, data: bytes, at: float) -> None:
        """See `ResponseSink.body`."""
        if not self.streamed or self._status != 200:
            self._body += data
            return
        before = len(self.text)
        for event in self._splitter.feed(data):
            payload = event_data(event)
            if payload and payload != b"[DONE]":
                self.take(json.loads(payload))
        if len(self.text) > before:
            self.reads.append(at)

    def end(self, at: float, broken: str | None = None) -> None:
        """Take the end of the connection's use."""
        self.ended, self.broken = at, broken
        if broken is None and self._status != 200:
            self.error = self._body.decode("utf-8", "replace")
        elif broken is None and not self.streamed:
            self.take(json.loads(self._body))

    @property
    def outcome(self) -> str:
        """COMPLETE, the code of its error, or one of the other outcomes above."""
        known = self.question
        if not known.text.startswith(self.text):
            return WRONG
        if self.broken is not None:
            return self.broken if self.broken in (HUNG, LEFT) else CUT
        if self.error is not None:
            found = errors.from_text(self.error)
            return found.code if found else UNCODED
        return COMPLETE if (self.text, self.told) == (known.text, known.tokens) else WRONG

    def __str__(self) -> str:
        known, got = self.question.text, self.text
        differ = (n for n, pair in enumerate(zip(known, got, strict=False)) if len({*pair}) > 1)
        same = next(differ, min(len(known), len(got)))
        return (
            f"{type(self).__name__}, {self.outcome}: {len(got)} of {len(known)} characters,"
            f" {self.told} of {self.question.tokens} tokens; {self.error or self.broken!r:.200};"
            f" then {got[same : same + _SHOWN]!r} instead of {known[same : same + _SHOWN]!r}"
        )


class PredictionStream(Answer):
    """Client of Cog's /predictions that reads events."""

    path, streamed = "/predictions", True

    def __init__(self, question: Question, sent: float) -> None:
        super().__init__(question, sent)
        self._pieces = 0

    def request(self, model: str) -> dict[str, Any]:
        """See `Answer.request`."""
        values = {"prompt": self.question.prompt, "max_tokens": self.question.tokens}
        return {"input": {**values, "min_tokens": self.question.tokens, "temperature": 0}}

    def take(self, data: Mapping[str, Any]) -> None:
        """See `Answer.take`; pieces are numbered."""
        if "chunk" in data:
            in_turn = data["index"] == self._pieces
            self._pieces += 1
            self.text += data["chunk"] if in_turn else f"[piece {data['index']}]"
        elif data.get("status") == "succeeded":
            self.told = data["metrics"]["output_token_count"]
            whole = "".join(data["output"])
            if not self.streamed:
                self.text = whole
            elif whole != self.text:
                self.text += f"[whole output: {whole[-_SHOWN:]}]"
        elif data.get("error"):
            self.error = str(data["error"])


class PredictionWhole(PredictionStream):
    """Client of /predictions that waits for the whole answer."""

    streamed = False


class CompletionStream(Answer):
    """Client of the OpenAI API's /v1/completions that reads events."""

    path, streamed = "/v1/completions", True

    def request(self, model: str) -> dict[str, Any]:
        """See `Answer.request`."""
        usage = {"stream": True, "stream_options": {"include_usage": True}} if self.streamed else {}
        values = {"prompt": self.question.prompt, "max_tokens": self.question.tokens}
        return {"model": model, "temperature": 0, "ignore_eos": True, **values, **usage}

    def take(self, data: Mapping[str, Any]) -> None:
        """See `Answer.take`."""
        if data.get("error"):
            self.error = str(data["error"])
            return
        for choice in data["choices"]:
            self.text += choice["text"]
        if data.get("usage"):
            self.told = data["usage"]["completion_tokens"]


class CompletionWhole(CompletionStream):
    """Client of /v1/completions that waits for the whole answer."""

    streamed = False


STREAMED: tuple[type[Answer], ...] = (PredictionStream, CompletionStream)
WHOLE: tuple[type[Answer], ...] = (PredictionWhole, CompletionWhole)
