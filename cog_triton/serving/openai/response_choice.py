"""Answer of /v1/responses: the response object, or the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cog_triton.errors import CogTritonError
from cog_triton.serving.generation import GenerationResult, TextPiece
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.chat_choice import ChatChoiceBuilder
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.deltas import Content
from cog_triton.serving.openai.response_items import ResponseItems
from cog_triton.serving.openai.responses import Envelope, Object, sse_event
from cog_triton.text.detokenize import TokenText


@dataclass(slots=True)
class ResponseEnvelope(Envelope):
    """Envelope of a `response`; `echoed` are fields of its request that it repeats."""

    echoed: Object = field(default_factory=dict)

    @classmethod
    def of_response(cls, model: str) -> ResponseEnvelope:
        """The envelope of a new response."""
        return cls("responses", "resp", "response", "response", model)

    @property
    def done(self) -> bytes:
        """See `Envelope.done`; the last event tells of the end."""
        return b""

    def whole(self, choices: Sequence[Object], usage: Object) -> Object:
        """See `Envelope.whole`; of the only choice."""
        (answer,) = choices
        return self.response(
            answer["status"], answer["output"], usage_object(usage["prompt_tokens"], usage)
        )

    def event(self, chunk: Object) -> bytes:
        """See `Envelope.event`."""
        return f"event: {chunk['type']}\n".encode() + sse_event(chunk)

    def failure(self, error: CogTritonError) -> bytes:
        """See `Envelope.failure`."""
        body = error_responses.error_body(error)
        return self.event({**body["error"], **body, "type": "error"})

    def response(self, status: str, output: list[Object], usage: Object | None) -> Object:
        """The response object."""
        cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
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
            "usage": usage,
            **self.echoed,
        }


class ResponseChoiceBuilder(ChatChoiceBuilder):
    """Builder of the only answer; events are numbered."""

    def __init__(
        self,
        envelope: ResponseEnvelope,
        token_text: TokenText,
        prompt_tokens: int,
        parser: AnswerParser | None = None,
    ) -> None:
        super().__init__(envelope, 0, token_text, parser=parser)
        self._response = envelope.response
        self._own_envelope = envelope
        self._prompt_tokens = prompt_tokens
        self._items = ResponseItems()
        self._events = 0

    def first_chunks(self) -> list[Object]:
        """See `ChoiceBuilder.first_chunks`."""
        begun = self._response("in_progress", [], None)
        return self._numbered(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        )

    def events(self, piece: TextPiece) -> bytes:
        """See `ChoiceBuilder.events`."""
        return b"".join(map(self._own_envelope.event, self.chunks(piece)))

    def chunks(self, piece: TextPiece) -> list[Object]:
        """See `ChoiceBuilder.chunks`."""
        return self._numbered(self._items.feed(self._parse(piece.text)))

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        """See `ChoiceBuilder.closing_chunks`."""
        status, events = self._finish(result)
        counts = {"completion_tokens": result.output_token_count}
        usage = usage_object(result.prompt_length or self._prompt_tokens, counts)
        response = self._response(status, self._items.output, usage)
        return self._numbered([*events, {"type": f"response.{status}", "response": response}])

    def choice(self, result: GenerationResult) -> Object:
        """See `ChoiceBuilder.choice`."""
        status, _ = self._finish(result)
        return {"status": status, "output": self._items.output}

    def _add_text(self, text: str) -> None:
        self._items.feed(self._parse(text))

    def _finish(self, result: GenerationResult) -> tuple[str, list[Object]]:
        """The status, and the events of the last items; at least one is made."""
        events = self._items.feed(self._parser.finish() if self._parser else [])
        if not self._items.output:
            events += self._items.feed([Content("")])
        status = "incomplete" if result.finish_reason == "length" else "completed"
        return status, [*events, *self._items.close(status)]

    def _numbered(self, events: list[Object]) -> list[Object]:
        first = self._events
        self._events += len(events)
        return [{**event, "sequence_number": first + place} for place, event in enumerate(events)]


def usage_object(prompt: int, counts: dict[str, Any]) -> Object:
    """The `usage` of a response, of `completion_tokens` beside `prompt`."""
    output = counts["completion_tokens"]
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
