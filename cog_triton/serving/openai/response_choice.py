"""Choice of /v1/responses, the only one: items of its output, and the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from cog_triton.serving.generation import GenerationResult, TextPiece
from cog_triton.serving.openai.choices import EventChoiceBuilder, call_id
from cog_triton.serving.openai.envelope import Object, ResponseEnvelope, usage_object
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
)
from cog_triton.text.detokenize import TokenText


class ResponseChoiceBuilder(EventChoiceBuilder):
    """Builder of the only answer; events are numbered."""

    def __init__(
        self,
        envelope: ResponseEnvelope,
        token_text: TokenText,
        prompt_tokens: int,
        parser: AnswerParser | None = None,
    ) -> None:
        super().__init__(envelope, token_text, prompt_tokens, parser)
        self._response = envelope
        self._items = ResponseItems()
        self._events = 0

    def first_chunks(self) -> list[Object]:
        begun = self._response.response("in_progress", [], None)
        return self._numbered(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        )

    def chunks(self, piece: TextPiece) -> list[Object]:
        return self._numbered(self._items.feed(self._parse(piece.text)))

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        status, events = self._finish(result)
        counts = {"completion_tokens": result.output_token_count}
        usage = usage_object(self._prompt_count(result), counts)
        response = self._response.response(status, self._items.output, usage)
        return self._numbered([*events, {"type": f"response.{status}", "response": response}])

    def choice(self, result: GenerationResult) -> Object:
        status, _ = self._finish(result)
        return {"status": status, "output": self._items.output}

    def _add_text(self, text: str) -> None:
        self._items.feed(self._parse(text))

    def _finish(self, result: GenerationResult) -> tuple[str, list[Object]]:
        """The status, and the events of the last items; at least one is made."""
        events = self._items.feed(self._held())
        if not self._items.output:
            events += self._items.feed([Content("")])
        status = "incomplete" if result.finish_reason == "length" else "completed"
        return status, [*events, *self._items.close(status)]

    def _numbered(self, events: list[Object]) -> list[Object]:
        first = self._events
        self._events += len(events)
        return [{**event, "sequence_number": first + place} for place, event in enumerate(events)]


class ResponseItems:
    """Builds `output`; an item is open until one of another kind, or the end, closes it."""

    def __init__(self) -> None:
        self.output: list[Object] = []
        self._open: Object | None = None
        self._texts: list[str] = []

    def feed(self, deltas: Iterable[Delta]) -> list[Object]:
        """The events of these deltas."""
        events: list[Object] = []
        for delta in deltas:
            match delta:
                case Content(text):
                    events += self._require("message")
                    events.append(self._text_delta("response.output_text.delta", text))
                    events[-1]["logprobs"] = []
                case Reasoning(text):
                    events += self._require("reasoning")
                    events.append(self._text_delta("response.reasoning_text.delta", text))
                case CallStart(_, name):
                    events += [*self.close("completed"), *self._start("function_call", name)]
                case CallArguments(_, text):
                    events.append(self._delta("response.function_call_arguments.delta", text))
        return events

    def close(self, status: str) -> list[Object]:
        """The events of the end of the open item, if there is one; `status` becomes its own."""
        item, self._open = self._open, None
        if item is None:
            return []
        text, self._texts = "".join(self._texts), []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = self._event(
                "response.function_call_arguments.done", item, arguments=text, name=item["name"]
            )
            return [done, self._item_event("response.output_item.done", item)]
        part = _part(item["type"], text)
        item["content"] = [part]
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        values = {"text": text, **({"logprobs": []} if kind == "output_text" else {})}
        return [
            self._event(f"response.{kind}.done", item, content_index=0, **values),
            self._event("response.content_part.done", item, content_index=0, part=part),
            self._item_event("response.output_item.done", item),
        ]

    def _require(self, kind: str) -> list[Object]:
        if self._open is not None and self._open["type"] == kind:
            return []
        return [*self.close("completed"), *self._start(kind)]

    def _start(self, kind: str, name: str = "") -> list[Object]:
        item: Object = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"id": _id("fc"), "call_id": call_id(), "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"id": _id("msg"), "role": "assistant", "content": []}
        else:
            item |= {"id": _id("rs"), "summary": [], "content": []}
        self.output.append(item)
        self._open = item
        events = [self._item_event("response.output_item.added", {**item})]
        if kind != "function_call":
            part = _part(kind, "")
            events.append(
                self._event("response.content_part.added", item, content_index=0, part=part)
            )
        return events

    def _text_delta(self, kind: str, text: str) -> Object:
        return {**self._delta(kind, text), "content_index": 0}

    def _delta(self, kind: str, text: str) -> Object:
        assert self._open is not None
        self._texts.append(text)
        return self._event(kind, self._open, delta=text)

    def _event(self, kind: str, item: Object, **values: Any) -> Object:
        place = len(self.output) - 1
        return {"type": kind, "item_id": item["id"], "output_index": place, **values}

    def _item_event(self, kind: str, item: Object) -> Object:
        return {"type": kind, "output_index": len(self.output) - 1, "item": item}


def _part(kind: str, text: str) -> Object:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
