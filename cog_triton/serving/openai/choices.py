"""Choices of an answer: of a chat its message or deltas, of a completion its text.

Each is built whole, or chunk by chunk; a completion is behind its prompt if that is echoed.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cog_triton.serving.generation import GenerationResult, TextPiece, TokenLogProb
from cog_triton.serving.openai.envelope import Envelope, Object, encode, sse_event
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.borrowed import BorrowedStream
from cog_triton.serving.openai.parsers.call_parser import (
    Answer,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    join,
)
from cog_triton.text.detokenize import TokenText

_TEXT = "\0text of a chunk\0"
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9


class ChoiceBuilder(ABC):
    """Builds one choice of a response: its chunks, or the complete one."""

    def __init__(
        self, envelope: Envelope, index: int, token_text: TokenText, *, log_probs: bool = False
    ) -> None:
        """`log_probs` says whether it tells those of its tokens."""
        self._envelope = envelope
        self._index = index
        self._token_text = token_text
        self._tells_log_probs = log_probs
        self._log_probs: list[TokenLogProb] = []
        self._around_text: tuple[bytes, bytes] | None = None

    @property
    def mean_log_prob(self) -> float:
        """Log probability of a complete choice per token, by which the best ones are known."""
        values = [item.log_prob for item in self._log_probs]
        return sum(values) / len(values) if values else 0.0

    @property
    def stream(self) -> BorrowedStream | None:
        """The stream of a parser of vLLM, if one parses this."""
        return None

    def first_chunks(self, result: GenerationResult) -> list[Object]:
        """The chunks before any text, if the endpoint has any; `result` is that so far."""
        return []

    def add(self, piece: TextPiece) -> None:
        """Take new text of a complete choice."""
        self._log_probs += piece.log_probs
        self._add_text(piece.text)

    def events(self, piece: TextPiece) -> bytes:
        """The events of new text, without usage."""
        if self._tells_log_probs:
            return b"".join(map(sse_event, self.chunks(piece)))
        return self._text_events(piece.text)

    def choice(self, result: GenerationResult) -> Object:
        """The complete choice, of all that was added."""
        log_probs = self._log_prob_object(self._log_probs)
        return {
            "index": self._index,
            **self._content(result),
            "logprobs": log_probs,
            "finish_reason": self._finish_reason(result),
        }

    @abstractmethod
    def chunks(self, piece: TextPiece) -> list[Object]:
        """The chunks of new text."""

    @abstractmethod
    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        """All chunks after the last text, the last with the finish reason."""

    @abstractmethod
    def _add_text(self, text: str) -> None: ...

    @abstractmethod
    def _content(self, result: GenerationResult) -> Object:
        """What a complete choice has of all text."""

    @abstractmethod
    def _text_content(self, text: str) -> Object:
        """What a chunk has of plain text."""

    @abstractmethod
    def _build_log_probs(self, log_probs: Sequence[TokenLogProb]) -> Object: ...

    def _text_events(self, text: str) -> bytes:
        return self._text_event(text)

    def _finish_reason(self, result: GenerationResult) -> str | None:
        return result.finish_reason

    def _log_prob_object(self, log_probs: Sequence[TokenLogProb]) -> Object | None:
        return self._build_log_probs(log_probs) if self._tells_log_probs else None

    def _chunk(self, content: Object, finish_reason: str | None = None) -> Object:
        choice = {
            "index": self._index,
            **content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        return self._envelope.chunk([choice])

    def _text_event(self, text: str) -> bytes:
        """The event of a chunk of plain text: all of it but the text is the same."""
        if self._around_text is None:
            before, after = sse_event(self._chunk(self._text_content(_TEXT))).split(encode(_TEXT))
            self._around_text = before, after
        before, after = self._around_text
        return before + encode(text) + after


class ChatChoiceBuilder(ChoiceBuilder):
    """Builder of a choice of a chat, with a parser if its reasoning or tool calls need one."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        token_text: TokenText,
        *,
        log_probs: bool = False,
        parser: AnswerParser | None = None,
    ) -> None:
        super().__init__(envelope, index, token_text, log_probs=log_probs)
        self._parser = parser
        self._deltas: list[Delta] = []

    @property
    def stream(self) -> BorrowedStream | None:
        return self._parser.stream if self._parser else None

    def first_chunks(self, result: GenerationResult) -> list[Object]:
        """The chunk with the role."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})]

    def chunks(self, piece: TextPiece) -> list[Object]:
        """See `ChoiceBuilder.chunks`; log probabilities are in the first one."""
        made = [self._delta(delta) for delta in self._parse(piece.text)]
        if self._tells_log_probs:
            made = made or [self._chunk({"delta": {}})]
            made[0]["choices"][0]["logprobs"] = self._log_prob_object(piece.log_probs)
        return made

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        held = [self._delta(delta) for delta in self._held()]
        return [*held, self._chunk({"delta": {}}, self._finish_reason(result))]

    def _parse(self, text: str) -> Sequence[Delta]:
        return self._parser.feed(text) if self._parser else [Content(text)]

    def _held(self) -> Sequence[Delta]:
        """What the parser has held back, after the last text."""
        return self._parser.finish() if self._parser else []

    def _add_text(self, text: str) -> None:
        self._deltas += self._parse(text)

    def _content(self, result: GenerationResult) -> Object:
        return {"message": message_object(join([*self._deltas, *self._held()]))}

    def _text_events(self, text: str) -> bytes:
        if self._parser is None:
            return self._text_event(text)
        return b"".join(
            self._text_event(delta.text)
            if isinstance(delta, Content)
            else sse_event(self._delta(delta))
            for delta in self._parser.feed(text)
        )

    def _text_content(self, text: str) -> Object:
        return {"delta": {"content": text}}

    def _delta(self, delta: Delta) -> Object:
        return self._chunk({"delta": delta_object(delta)})

    def _finish_reason(self, result: GenerationResult) -> str | None:
        reason = result.finish_reason
        return self._parser.finish_reason(reason) if self._parser else reason

    def _build_log_probs(self, log_probs: Sequence[TokenLogProb]) -> Object:
        return chat_log_probs(self._token_text, log_probs)


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompt that a completion begins with; `alone` says that it has nothing else."""

    text: str
    first_id: int
    alone: bool


class CompletionChoiceBuilder(ChoiceBuilder):
    """Builder of a choice of a completion."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        token_text: TokenText,
        *,
        log_probs: bool = False,
        top_log_probs: int = 0,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(envelope, index, token_text, log_probs=log_probs)
        self._texts: list[str] = []
        self._prompt_log_probs: Sequence[TokenLogProb] = ()
        self._echo = echo
        self._alone = echo is not None and echo.alone
        self._log_prob_builder = CompletionLogProbs(token_text, top=top_log_probs > 0)

    def add(self, piece: TextPiece) -> None:
        self._prompt_log_probs = piece.prompt or self._prompt_log_probs
        super().add(piece)

    def events(self, piece: TextPiece) -> bytes:
        if self._echo is None and not self._alone:
            return super().events(piece)
        return b"".join(map(sse_event, self.chunks(piece)))

    def chunks(self, piece: TextPiece) -> list[Object]:
        echoed = self._echo_chunks(piece.prompt)
        if self._alone or not (piece.text or piece.log_probs):
            return echoed
        chunk = self._chunk(self._text_content(piece.text))
        chunk["choices"][0]["logprobs"] = self._log_prob_object(piece.log_probs)
        return [*echoed, chunk]

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        last = self._chunk({"text": ""}, self._finish_reason(result))
        return [*self._echo_chunks(()), last]

    def _echo_chunks(self, log_probs: Sequence[TokenLogProb]) -> list[Object]:
        """The chunk of the prompt, before anything else."""
        if self._echo is None:
            return []
        echo, self._echo = self._echo, None
        chunk = self._chunk(self._text_content(echo.text))
        if self._tells_log_probs:
            found = self._log_prob_builder.build(log_probs, echo.first_id)
            chunk["choices"][0]["logprobs"] = found
        return [chunk]

    def _add_text(self, text: str) -> None:
        self._texts.append(text)

    def _content(self, result: GenerationResult) -> Object:
        texts = [] if self._alone else self._texts
        return {"text": "".join([self._echo.text if self._echo else "", *texts])}

    def _text_content(self, text: str) -> Object:
        return {"text": text}

    def _finish_reason(self, result: GenerationResult) -> str | None:
        return "length" if self._alone else result.finish_reason

    def _build_log_probs(self, log_probs: Sequence[TokenLogProb]) -> Object:
        if self._echo is None:
            return self._log_prob_builder.build(log_probs)
        own = [] if self._alone else log_probs
        return self._log_prob_builder.build([*self._prompt_log_probs, *own], self._echo.first_id)


def chat_log_probs(token_text: TokenText, log_probs: Iterable[TokenLogProb]) -> Object:
    """The `logprobs` of a chat's choice."""

    def told(token_id: int, log_prob: float) -> Object:
        raw = token_text(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": log_prob,
            "bytes": list(raw),
        }

    content = [
        {**told(token_id, log_prob), "top_logprobs": [told(*pair) for pair in top]}
        for token_id, log_prob, top in log_probs
    ]
    return {"content": content, "refusal": None}


class CompletionLogProbs:
    """Builder of a completion's `logprobs`, piece by piece.

    `text_offset` is where a token begins in the text, in characters.
    """

    def __init__(self, token_text: TokenText, *, top: bool) -> None:
        """`top` says whether the likeliest tokens are told."""
        self._token_text = token_text
        self._top = top
        self._offset = 0

    def build(self, log_probs: Iterable[TokenLogProb], first_id: int | None = None) -> Object:
        """The object of tokens that follow those before.

        `first_id` is the first token of an echoed prompt, whose probability nobody knows.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets = []
        if first_id is not None:
            tokens.append(self._text(first_id))
            values.append(None)
            tops.append(None)
        for token_id, log_prob, top in log_probs:
            tokens.append(self._text(token_id))
            values.append(log_prob)
            # The likeliest first: of two tokens with the same text, its value stays.
            tops.append({self._text(other): value for other, value in reversed(top)})
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self._token_text(token_id).decode("utf-8", "replace")


def call_id() -> str:
    """A new id of a tool call: nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


def delta_object(delta: Delta) -> Object:
    """The `delta` of a chunk; reasoning has the name of DeepSeek's API, and vLLM's."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **_call(name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_object(answer: Answer) -> Object:
    """The whole message; its content is null if there is none beside calls or reasoning."""
    message: Object = {"role": "assistant", "content": answer.content, "refusal": None}
    message["annotations"] = []
    if answer.reasoning:
        message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [_call(call.name, call.arguments) for call in answer.calls]
    if not answer.content and (answer.reasoning or answer.calls):
        message["content"] = None
    return message


def _call(name: str, arguments: str) -> Object:
    return {
        "id": call_id(),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
