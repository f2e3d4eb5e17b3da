"""Items of the only answer of an API whose events have names; each is of one kind, in their order.

Shared by /v1/responses and /v1/messages, which name items and events each in its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

from cog_triton.serving.generation import GenerationResult, TextPiece
from cog_triton.serving.openai.choices import ChatChoiceBuilder
from cog_triton.serving.openai.envelope import Envelope, Object, Usage
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import CallStart, Content, Delta, Reasoning
from cog_triton.text.detokenize import TokenText

Kind = Literal["text", "reasoning", "call"]


class AnswerItems(ABC):
    """Builds `output`; an item is open until one of another kind, or the end, closes it."""

    def __init__(self) -> None:
        self.output: list[Object] = []
        self._open: Object = {}
        self._kind: Kind | None = None
        self._texts: list[str] = []

    def feed(self, deltas: Iterable[Delta]) -> list[Object]:
        """The events of these deltas."""
        events: list[Object] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                events += self._change("call", delta.name)
                continue
            if isinstance(delta, Content | Reasoning):
                kind: Kind = "text" if isinstance(delta, Content) else "reasoning"
                events += self._change(kind) if kind != self._kind else []
            self._texts.append(delta.text)
            events.append(self._delta(delta.text))
        return events

    def close(self, status: str = "completed") -> list[Object]:
        """The events of the end of the open item, if there is one; `status` is how it ended."""
        if (kind := self._kind) is None:
            return []
        text, self._texts, self._kind = "".join(self._texts), [], None
        return self._end(kind, text, status)

    def _change(self, kind: Kind, name: str = "") -> list[Object]:
        events = self.close()
        self._kind = kind
        return [*events, *self._start(kind, name)]

    @abstractmethod
    def _start(self, kind: Kind, name: str) -> list[Object]:
        """The events of a new item, which becomes `_open`; `name` is of a call."""

    @abstractmethod
    def _delta(self, text: str) -> Object:
        """The event of more text of the open item."""

    @abstractmethod
    def _end(self, kind: Kind, text: str, status: str) -> list[Object]:
        """The events of the end of `_open`, whose whole text is known."""


class EventChoiceBuilder(ChatChoiceBuilder):
    """Base of builders of the only answer of an API whose events have names."""

    def __init__(
        self,
        envelope: Envelope,
        token_text: TokenText,
        prompt_tokens: int,
        parser: AnswerParser | None = None,
    ) -> None:
        super().__init__(envelope, 0, token_text, parser=parser)
        self._prompt_tokens = prompt_tokens

    def events(self, piece: TextPiece) -> bytes:
        return b"".join(map(self._envelope.event, self.chunks(piece)))

    def _usage(self, result: GenerationResult, *, begun: bool = False) -> Usage:
        """The tokens so far; those of the output are 0 if the answer has only `begun`."""
        prompt, cached = result.prompt_length or self._prompt_tokens, result.cached_tokens
        if begun:
            return Usage(prompt, 0, cached)
        return Usage(prompt, result.output_token_count, cached, result.reasoning_tokens)
