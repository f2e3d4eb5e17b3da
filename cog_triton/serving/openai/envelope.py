"""Envelopes: what all objects of one answer have around their choices, and their events.

Shapes follow OpenAI's reference, "The chat completion (chunk) object", "The completion object" and
"The response object", and Anthropic's, "Messages".
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any, ClassVar, NamedTuple

from cog_triton.errors import CogTritonError
from cog_triton.serving.openai import error_responses

Object = dict[str, Any]
ANTHROPIC = "anthropic-version"
"""Header of Anthropic's clients."""
DONE = b"data: [DONE]\n\n"
_json_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Usage(NamedTuple):
    """Tokens of an answer: `cached` ones are of the prompt, `reasoning` ones of the output."""

    prompt: int
    output: int
    cached: int = 0
    reasoning: int = 0

    def of_chat(self) -> Object:
        """The `usage` of chats and completions; details that are 0 are left out, as by vLLM."""
        found: Object = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
        }
        if self.cached:
            found["prompt_tokens_details"] = {"cached_tokens": self.cached}
        if self.reasoning:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return found

    def of_response(self) -> Object:
        """The `usage` of a response."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.output,
        }

    def of_message(self) -> Object:
        """The `usage` of a message: clients add cached tokens to `input_tokens`."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.output,
            "output_tokens_details": {"thinking_tokens": self.reasoning},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }


@dataclass(slots=True)
class Envelope:
    """What all objects of a `chat.completion` have around their choices; the same id and time.

    `model` is the base model, or the adapter that the request turns out to name.
    """

    endpoint: ClassVar[str] = "chat"
    prefix: ClassVar[str] = "chatcmpl"
    full_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    model: str
    id: str = field(init=False)
    created: int = field(init=False)
    tells_usage: bool = field(init=False, default=False)
    """Whether each chunk has a usage, null but for the last."""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def chunk(self, choices: Sequence[Object]) -> Object:
        """A chunk of a stream."""
        made = self._object(self.chunk_object, choices)
        return {**made, "usage": None} if self.tells_usage else made

    def whole(self, choices: Sequence[Object], usage: Usage) -> Object:
        """The complete response."""
        return {**self._object(self.full_object, choices), "usage": usage.of_chat()}

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


class CompletionEnvelope(Envelope):
    """Envelope of a `text_completion`, whose chunks are of the same type."""

    endpoint, prefix = "completions", "cmpl"
    full_object = chunk_object = "text_completion"


class EventEnvelope(Envelope):
    """Envelope of a stream whose events have names; the last one tells of the end."""

    @property
    def done(self) -> bytes:
        return b""

    def event(self, chunk: Object) -> bytes:
        return f"event: {chunk['type']}\n".encode() + sse_event(chunk)


@dataclass(slots=True)
class ResponseEnvelope(EventEnvelope):
    """Envelope of a `response`; `echoed` are fields of its request that it repeats."""

    endpoint, prefix = "responses", "resp"
    echoed: Object = field(default_factory=dict)
    made: Object = field(default_factory=dict)
    """The last response object."""
    error: CogTritonError | None = None
    """Why it failed."""
    _events: int = 0

    def whole(self, choices: Sequence[Object], usage: Usage) -> Object:
        """See `Envelope.whole`; of the only choice."""
        (answer,) = choices
        return self.response(answer["status"], answer["output"], usage)

    def numbered(self, events: list[Object]) -> list[Object]:
        """The next events, with their numbers."""
        first = self._events
        self._events += len(events)
        return [{**event, "sequence_number": first + place} for place, event in enumerate(events)]

    def failure(self, error: CogTritonError) -> bytes:
        self.error = error
        body = error_responses.error_body(error)
        (event,) = self.numbered([{**body["error"], **body, "type": "error"}])
        return self.event(event)

    def response(self, status: str, output: list[Object], usage: Usage | None) -> Object:
        cut = status == "incomplete"
        self.made = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": output,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "top_logprobs": 0,
            "usage": usage and usage.of_response(),
            **self.echoed,
        }
        return self.made


class MessageEnvelope(EventEnvelope):
    """Envelope of a `message` of Anthropic's API."""

    endpoint, prefix = "messages", "msg"

    def whole(self, choices: Sequence[Object], usage: Usage) -> Object:
        """See `Envelope.whole`; of the only choice."""
        (answer,) = choices
        return self.message(answer["content"], answer["end"], usage)

    def failure(self, error: CogTritonError) -> bytes:
        return self.event(error_responses.error_body(error, path=error_responses.MESSAGES))

    def message(self, content: list[Object], end: Object, usage: Usage) -> Object:
        """The message object; `end` has its `stop_reason` and what goes with that."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end,
            "usage": usage.of_message(),
        }


def anthropic_models(models: Sequence[Object]) -> Object:
    """The list of `model` objects of OpenAI's API as Anthropic's, whole."""
    found = [anthropic_model(model) for model in models]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": False, "first_id": first, "last_id": last}


def anthropic_model(model: Object) -> Object:
    """A `model` object of OpenAI's API as Anthropic's `ModelInfo`."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
        "capabilities": None,
        "lifecycle": "active",
    }


def sse_event(data: Object) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def encode(value: Object | str) -> bytes:
    """JSON of a value, on one line."""
    return (encode_basestring(value) if type(value) is str else _json_encoder(value)).encode()
