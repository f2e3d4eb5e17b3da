"""Reasoning before an answer: ``<think>...</think>``, ``[THINK]...[/THINK]``."""

from __future__ import annotations

from cog_triton.serving.openai.parsers.call_parser import open_length
from cog_triton.serving.openai.parsers.deltas import Content, Delta, Reasoning


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
        if self._state == "answer":
            return [Content(text)] if text else []
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
                self._state, self._held = "answer", rest
            else:
                kept = 0 if final else open_length(self._held, self._closing)
                end = len(self._held) - kept
                inside, self._held = self._held[:end], self._held[end:]
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
