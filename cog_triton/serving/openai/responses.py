"""Response objects of /v1/chat/completions and /v1/completions, complete or in chunks.

Shapes follow OpenAI's reference, "The chat completion (chunk) object" and "The completion object".
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from cog_triton.serving.generate import Generation
from cog_triton.serving.generation import TokenLogProb
from cog_triton.serving.openai.delta_objects import delta_object, message_object
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.deltas import Content, Delta, join
from cog_triton.text.detokenize import TokenText

Object = dict[str, Any]
_json_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_TEXT = "\0text of a chunk\0"


class ResponseBuilder(ABC):
    """Builds the objects of one response: chunks of a stream, or the complete object."""

    endpoint: ClassVar[str]
    prefix: ClassVar[str]
    full_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, token_text: TokenText) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head: Object = {"id": self.id, "created": int(time.time()), "model": model}
        self._token_text = token_text
        self._texts: list[str] = []
        self._around_text: tuple[bytes, bytes] | None = None

    def first_chunk(self) -> Object | None:
        """The chunk before any text, if the endpoint has one."""
        return None

    def add(self, text: str) -> None:
        """Take new text of a complete response."""
        self._texts.append(text)

    def chunks(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> list[Object]:
        """The chunks of new text, and log probabilities of its tokens if requested."""
        return [self.chunk(text, log_probs)]

    def end_chunks(self) -> list[Object]:
        """The chunks of what was held back, after the last text."""
        return []

    @abstractmethod
    def chunk(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> Object:
        """A chunk with new text, and log probabilities of its tokens if requested."""

    @abstractmethod
    def last_chunk(self, generation: Generation) -> Object:
        """The chunk with the finish reason."""

    @abstractmethod
    def full_response(
        self, log_probs: Sequence[TokenLogProb] | None, generation: Generation
    ) -> Object:
        """The complete response in one object, of all texts that were added."""

    def events(self, text: str) -> bytes:
        """The events of new text, without log probabilities or usage."""
        return self._text_event(text)

    def _text_event(self, text: str) -> bytes:
        """The event of a chunk without log probabilities: all of it but the text is the same."""
        if self._around_text is None:
            before, after = sse_event(self.chunk(_TEXT, None)).split(_encode(_TEXT))
            self._around_text = before, after
        before, after = self._around_text
        return before + _encode(text) + after

    def usage_chunk(self, generation: Generation) -> Object:
        """The chunk with token counts, which has no choices."""
        counts = usage(generation, generation.result.output_token_count)
        return {**self._object(self.chunk_object, []), "usage": counts}

    def _object(self, full_object: str, choices: list[Object]) -> Object:
        return {**self._head, "object": full_object, "choices": choices}


class ChatResponseBuilder(ResponseBuilder):
    """Builder of a `chat.completion`, or its `chat.completion.chunk` objects."""

    endpoint = "chat"
    prefix = "chatcmpl"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    parser: AnswerParser | None = None
    """Parser of reasoning and tool calls, if the request needs one."""

    def __init__(self, model: str, token_text: TokenText) -> None:
        super().__init__(model, token_text)
        self._deltas: list[Delta] = []

    def add(self, text: str) -> None:
        """See `ResponseBuilder.add`."""
        self._deltas += self.parser.feed(text) if self.parser else [Content(text)]

    def chunks(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> list[Object]:
        """See `ResponseBuilder.chunks`; log probabilities are in the first one."""
        if self.parser is None:
            return [self.chunk(text, log_probs)]
        made = [self._delta(delta_object(delta), None) for delta in self.parser.feed(text)]
        if log_probs is not None:
            made = made or [self._delta({}, None)]
            made[0]["choices"][0]["logprobs"] = self._log_probs(log_probs)
        return made

    def events(self, text: str) -> bytes:
        """See `ResponseBuilder.events`."""
        if self.parser is None:
            return self._text_event(text)
        return b"".join(
            self._text_event(delta.text)
            if isinstance(delta, Content)
            else sse_event(self._delta(delta_object(delta), None))
            for delta in self.parser.feed(text)
        )

    def end_chunks(self) -> list[Object]:
        """See `ResponseBuilder.end_chunks`."""
        deltas = self.parser.finish() if self.parser else []
        return [self._delta(delta_object(delta), None) for delta in deltas]

    def first_chunk(self) -> Object | None:
        """The chunk with the role."""
        return self._delta({"role": "assistant", "content": ""}, None)

    def chunk(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> Object:
        """See `ResponseBuilder.chunk`."""
        return self._delta({"content": text}, log_probs)

    def last_chunk(self, generation: Generation) -> Object:
        """See `ResponseBuilder.last_chunk`."""
        return self._delta({}, None, self._finish_reason(generation))

    def full_response(
        self, log_probs: Sequence[TokenLogProb] | None, generation: Generation
    ) -> Object:
        """See `ResponseBuilder.full_response`."""
        held = self.parser.finish() if self.parser else []
        choice = {
            "index": 0,
            "message": message_object(join([*self._deltas, *held])),
            "logprobs": self._log_probs(log_probs),
            "finish_reason": self._finish_reason(generation),
        }
        return {
            **self._object(self.full_object, [choice]),
            "usage": usage(generation, generation.result.output_token_count),
        }

    def _finish_reason(self, generation: Generation) -> str | None:
        reason = generation.result.finish_reason
        return self.parser.finish_reason(reason) if self.parser else reason

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
        return self._object(self.chunk_object, [choice])

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


class CompletionResponseBuilder(ResponseBuilder):
    """Builder of a `text_completion`, whose chunks are of the same type."""

    endpoint = "completions"
    prefix = "cmpl"
    full_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, model: str, token_text: TokenText) -> None:
        super().__init__(model, token_text)
        self._offset = 0

    def chunk(self, text: str, log_probs: Sequence[TokenLogProb] | None) -> Object:
        """See `ResponseBuilder.chunk`."""
        return self._choice(text, log_probs, None)

    def last_chunk(self, generation: Generation) -> Object:
        """See `ResponseBuilder.last_chunk`."""
        return self._choice("", None, generation.result.finish_reason)

    def full_response(
        self, log_probs: Sequence[TokenLogProb] | None, generation: Generation
    ) -> Object:
        """See `ResponseBuilder.full_response`."""
        text = "".join(self._texts)
        answer = self._choice(text, log_probs, generation.result.finish_reason)
        return {**answer, "usage": usage(generation, generation.result.output_token_count)}

    def _choice(
        self, text: str, log_probs: Sequence[TokenLogProb] | None, finish_reason: str | None
    ) -> Object:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._log_probs(log_probs),
            "finish_reason": finish_reason,
        }
        return self._object(self.full_object, [choice])

    def _log_probs(self, log_probs: Sequence[TokenLogProb] | None) -> Object | None:
        """OpenAI's logprobs object; `text_offset` is where the token begins, in characters."""
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
    """OpenAI's usage object for the prompt and `output` generated tokens."""
    prompt = len(generation.request.input_ids)
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
