"""Response objects of both endpoints: what is around choices, and what builds one choice.

Shapes follow OpenAI's reference, "The chat completion (chunk) object" and "The completion object".
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cog_triton.errors import CogTritonError
from cog_triton.serving.generation import GenerationResult, TextPiece, TokenLogProb
from cog_triton.serving.openai import error_responses
from cog_triton.text.detokenize import TokenText

Object = dict[str, Any]
_json_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_TEXT = "\0text of a chunk\0"


@dataclass(slots=True)
class Envelope:
    """What all objects of one response have around their choices; the same id and time.

    `model` is the base model, or the adapter that the request turns out to name.
    """

    endpoint: str
    prefix: str
    full_object: str
    chunk_object: str
    model: str
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    @classmethod
    def of_chat(cls, model: str) -> Envelope:
        """The envelope of a `chat.completion`, or its chunks."""
        return cls("chat", "chatcmpl", "chat.completion", "chat.completion.chunk", model)

    @classmethod
    def of_completion(cls, model: str) -> Envelope:
        """The envelope of a `text_completion`, whose chunks are of the same type."""
        return cls("completions", "cmpl", "text_completion", "text_completion", model)

    def chunk(self, choices: Sequence[Object]) -> Object:
        """A chunk of a stream."""
        return self._object(self.chunk_object, choices)

    def whole(self, choices: Sequence[Object], usage: Object) -> Object:
        """The complete response."""
        return {**self._object(self.full_object, choices), "usage": usage}

    @property
    def done(self) -> bytes:
        """What ends a stream."""
        return DONE

    def event(self, chunk: Object) -> bytes:
        """The server-sent event of a chunk."""
        return sse_event(chunk)

    def failure(self, error: CogTritonError) -> bytes:
        """The event that ends a stream with an error."""
        return sse_event(error_responses.error_body(error))

    def _object(self, kind: str, choices: Sequence[Object]) -> Object:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "object": kind,
            "choices": list(choices),
        }


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

    def first_chunks(self) -> list[Object]:
        """The chunks before any text, if the endpoint has any."""
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
            **self._content(),
            "logprobs": log_probs,
            "finish_reason": self._finish_reason(result),
        }

    @abstractmethod
    def chunks(self, piece: TextPiece) -> list[Object]:
        """The chunks of new text."""

    def end_chunks(self) -> list[Object]:
        """The chunks of what was held back, after the last text."""
        return []

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        """All chunks after the last text."""
        return [*self.end_chunks(), self.last_chunk(result)]

    @abstractmethod
    def last_chunk(self, result: GenerationResult) -> Object:
        """The chunk with the finish reason."""

    @abstractmethod
    def _add_text(self, text: str) -> None: ...

    @abstractmethod
    def _content(self) -> Object: ...

    @abstractmethod
    def _text_chunk(self, text: str) -> Object: ...

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
            before, after = sse_event(self._text_chunk(_TEXT)).split(_encode(_TEXT))
            self._around_text = before, after
        before, after = self._around_text
        return before + _encode(text) + after


def usage(prompt: int, output: int) -> Object:
    """OpenAI's usage object for `prompt` and `output` tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def sse_event(data: Object) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def _encode(value: Object | str) -> bytes:
    return _json_encoder(value).encode()


DONE = b"data: [DONE]\n\n"
