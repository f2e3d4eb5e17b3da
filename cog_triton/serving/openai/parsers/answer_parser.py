"""Parser of a whole answer: reasoning first, then content and tool calls, guided ones too."""

from __future__ import annotations

from collections.abc import Sequence

from cog_triton.serving.openai.parsers.borrowed import BorrowedStream
from cog_triton.serving.openai.parsers.call_parser import (
    CallArguments,
    CallParser,
    CallStart,
    Content,
    Delta,
    Reasoning,
    merge,
    open_length,
)


class ReasoningParser:
    """Parser that splits text into reasoning, up to the closing marker, and the answer after it.

    Unless the prompt has `opened` it, only what begins with the opening marker is reasoning.
    """

    def __init__(self, opening: str, closing: str, *, opened: bool) -> None:
        self._opening, self._closing = opening, closing
        self._opened = opened
        self._state = "start"
        self._space: list[str] = []
        self._held = ""

    def feed(self, text: str) -> list[Delta]:
        """What this text completes."""
        self._held += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        """What was held back; call once, after the last text."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self._state == "start" and (self._held or final):
            self._start(final=final)
        if self._state == "reasoning":
            inside, closing, rest = self._held.partition(self._closing)
            if closing:
                self._state = "answer"
            elif not final:
                end = len(inside) - open_length(inside, self._closing)
                inside, rest = inside[:end], inside[end:]
            self._held = rest
            if inside:
                deltas.append(Reasoning(inside))
        if self._state == "answer" and self._held:
            deltas.append(Content(self._held))
            self._held = ""
        return deltas

    def _start(self, *, final: bool) -> None:
        """Look for the opening marker, after white space."""
        text = self._held.lstrip()
        self._space.append(self._held[: len(self._held) - len(text)])
        self._held = text
        if text.startswith(self._opening):
            self._held = text[len(self._opening) :]
            self._state = "reasoning"
        elif final or not self._opening.startswith(text):
            self._held = "".join([*self._space, text])
            self._state = "reasoning" if self._opened else "answer"


class AnswerParser:
    """Reasoning and call parsers in a row; the deltas of a cut text join to those of the whole."""

    def __init__(
        self,
        reasoning: ReasoningParser | BorrowedStream | None = None,
        calls: CallParser | None = None,
        *,
        include_reasoning: bool = True,
        parallel: bool = True,
        forced: bool = False,
    ) -> None:
        """Without `include_reasoning` it is left out; calls after the first without `parallel`.

        `forced` says that the call is one that the request has named.
        """
        self._reasoning = reasoning
        self._calls = calls
        self._include_reasoning = include_reasoning
        self._parallel = parallel
        self._forced = forced
        self.called = False
        """Whether there was a call."""

    @property
    def stream(self) -> BorrowedStream | None:
        """The stream of a parser of vLLM."""
        return self._reasoning if isinstance(self._reasoning, BorrowedStream) else None

    def finish_reason(self, reason: str | None) -> str | None:
        """What to report for the engine's `reason`, after `finish`.

        An answer that ends with a call has the reason tool_calls, or stop for a call that was
        forced by name, as in OpenAI's API. One that was cut after its calls stays `length`.
        """
        if self._calls is not None and self._calls.ended:
            reason = "stop"
        return "tool_calls" if reason == "stop" and self.called and not self._forced else reason

    def feed(self, text: str) -> list[Delta]:
        """What this text completes."""
        deltas = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._kept(self._parsed(deltas))

    def finish(self) -> list[Delta]:
        """What was held back; call once, after the last text."""
        deltas = [] if self._reasoning is None else self._reasoning.finish()
        found = self._parsed(deltas)
        if self._calls is not None:
            found += self._calls.finish()
        return self._kept(found)

    def _parsed(self, deltas: Sequence[Delta]) -> list[Delta]:
        if self._calls is None:
            return list(deltas)
        found: list[Delta] = []
        for delta in deltas:
            found += self._calls.feed(delta.text) if isinstance(delta, Content) else [delta]
        return found

    def _kept(self, deltas: Sequence[Delta]) -> list[Delta]:
        self.called |= any(isinstance(delta, CallStart) for delta in deltas)
        return merge(
            delta
            for delta in deltas
            if (self._include_reasoning or not isinstance(delta, Reasoning))
            and (
                self._parallel or not isinstance(delta, CallStart | CallArguments) or not delta.call
            )
        )
