"""The answers of /v1/chat/completions and /v1/completions, whole or in pieces.

Shapes follow OpenAI's reference, "The chat completion (chunk) object" and "The completion object".
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from cog_triton.serving.generate import Generation, TokenLogProb
from cog_triton.text.detokenize import TokenText

Object = dict[str, Any]


class Answer(ABC):
    """One answer on its way to the client."""

    endpoint: ClassVar[str]
    prefix: ClassVar[str]
    kind: ClassVar[str]
    piece_kind: ClassVar[str]

    def __init__(self, model: str, token_text: TokenText) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head: Object = {"id": self.id, "created": int(time.time()), "model": model}
        self._token_text = token_text

    def opening(self) -> Object | None:
        """The piece that comes before any text."""
        return None

    @abstractmethod
    def piece(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> Object:
        """New text, and the log probabilities of its tokens if they were asked for."""

    @abstractmethod
    def closing(self, generation: Generation) -> Object:
        """The piece that says why the answer ends."""

    @abstractmethod
    def whole(
        self, text: str, log_probs: Sequence[TokenLogProb] | None, generation: Generation
    ) -> Object:
        """The answer in one object."""

    def usage(self, generation: Generation) -> Object:
        """The piece with the token counts, which has no choices."""
        told = usage(generation, generation.output_token_count)
        return {**self._object(self.piece_kind, []), "usage": told}

    def _object(self, kind: str, choices: list[Object]) -> Object:
        return {**self._head, "object": kind, "choices": choices}


class ChatAnswer(Answer):
    """A `chat.completion`, or its `chat.completion.chunk` pieces."""

    endpoint = "chat"
    prefix = "chatcmpl"
    kind = "chat.completion"
    piece_kind = "chat.completion.chunk"

    def opening(self) -> Object | None:
        """Who speaks."""
        return self._delta({"role": "assistant", "content": ""}, None)

    def piece(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> Object:
        """See `Answer.piece`."""
        return self._delta({"content": text}, log_probs)

    def closing(self, generation: Generation) -> Object:
        """See `Answer.closing`."""
        return self._delta({}, None, generation.finish_reason)

    def whole(
        self, text: str, log_probs: Sequence[TokenLogProb] | None, generation: Generation
    ) -> Object:
        """See `Answer.whole`."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._log_probs(log_probs),
            "finish_reason": generation.finish_reason,
        }
        return {
            **self._object(self.kind, [choice]),
            "usage": usage(generation, generation.output_token_count),
        }

    def _delta(
        self,
        delta: Object,
        log_probs: Sequence[TokenLogProb] | None,
        finish_reason: str | None = None,
    ) -> Object:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._log_probs(log_probs),
            "finish_reason": finish_reason,
        }
        return self._object(self.piece_kind, [choice])

    def _log_probs(self, log_probs: Sequence[TokenLogProb] | None) -> Object | None:
        if log_probs is None:
            return None
        content = []
        for token_id, log_prob in log_probs:
            raw = self._token_text.raw(token_id)
            content.append(
                {
                    "token": raw.decode("utf-8", "replace"),
                    "logprob": log_prob,
                    "bytes": list(raw),
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """A `text_completion`, whole or in pieces of the same kind."""

    endpoint = "completions"
    prefix = "cmpl"
    kind = "text_completion"
    piece_kind = "text_completion"

    def __init__(self, model: str, token_text: TokenText) -> None:
        super().__init__(model, token_text)
        self._offset = 0

    def piece(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> Object:
        """See `Answer.piece`."""
        return self._choice(text, log_probs, None)

    def closing(self, generation: Generation) -> Object:
        """See `Answer.closing`."""
        return self._choice("", None, generation.finish_reason)

    def whole(
        self, text: str, log_probs: Sequence[TokenLogProb] | None, generation: Generation
    ) -> Object:
        """See `Answer.whole`."""
        answer = self._choice(text, log_probs, generation.finish_reason)
        return {**answer, "usage": usage(generation, generation.output_token_count)}

    def _choice(
        self, text: str, log_probs: Sequence[TokenLogProb] | None, finish_reason: str | None
    ) -> Object:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._log_probs(log_probs),
            "finish_reason": finish_reason,
        }
        return self._object(self.kind, [choice])

    def _log_probs(self, log_probs: Sequence[TokenLogProb] | None) -> Object | None:
        """`text_offset` is where the token begins in the text, in characters."""
        if log_probs is None:
            return None
        tokens, offsets = [], []
        for token_id, _ in log_probs:
            token = self._token_text.raw(token_id).decode("utf-8", "replace")
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [log_prob for _, log_prob in log_probs],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage(generation: Generation, output: int) -> Object:
    """Token counts as the engine has them, with `output` tokens of the answer."""
    prompt = len(generation.input_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def event(data: Object) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"
