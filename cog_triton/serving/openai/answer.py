"""Answer of one sequence: the deltas of its text, its log probabilities, and why it ended.

The shapes of the APIs make of it what each of them sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cog_triton.serving.generation import GenerationResult, TextPiece, TokenLogProb
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.borrowed import BorrowedStream
from cog_triton.serving.openai.parsers.call_parser import Content, Delta
from cog_triton.text.detokenize import TokenText


class Usage(NamedTuple):
    """Tokens of an answer: `cached` ones are of the prompt, `reasoning` ones of the output."""

    prompt: int
    output: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompt that a completion begins with; if `alone`, the completion has nothing else."""

    text: str
    first_id: int
    alone: bool


@dataclass(slots=True)
class Answer:
    """Answer number `index` of a request; `parser` splits its text, if a parser is needed.

    `log_probs` says whether the log probabilities of the tokens are sent, `top` whether those of
    the likeliest tokens are too.
    """

    index: int
    token_text: TokenText
    parser: AnswerParser | None = None
    log_probs: bool = False
    top: bool = False
    echo: Echo | None = None
    echoed: bool = False
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[TokenLogProb] = field(default_factory=list)
    prompt: Sequence[TokenLogProb] = ()
    offset: int = 0
    """Characters of the text before the next token."""
    frame: tuple[bytes, bytes] | None = None
    """Bytes around the text of an event."""

    @property
    def alone(self) -> bool:
        """Whether the answer is nothing but its prompt."""
        return self.echo is not None and self.echo.alone

    @property
    def stream(self) -> BorrowedStream | None:
        """The stream of vLLM's parser, if one parses this."""
        return self.parser.stream if self.parser else None

    @property
    def mean_log_prob(self) -> float:
        """Log probability per token of a complete answer, by which the best ones are chosen."""
        return sum(item.log_prob for item in self.tokens) / max(len(self.tokens), 1)

    def add(self, piece: TextPiece) -> None:
        """Take new text of an answer that is sent when it is complete."""
        self.prompt = piece.prompt or self.prompt
        self.tokens += piece.log_probs
        self.deltas += self.feed(piece.text)

    def feed(self, text: str) -> Sequence[Delta]:
        """Deltas that new text completes."""
        return self.parser.feed(text) if self.parser else (Content(text),)

    def rest(self) -> Sequence[Delta]:
        """Deltas after the last text; to be called once."""
        return self.parser.finish() if self.parser else ()

    def finish_reason(self, result: GenerationResult) -> str | None:
        """Why the answer ended; to be called after `rest`."""
        reason = result.finish_reason
        return self.parser.finish_reason(reason) if self.parser else reason
