"""Choice of /v1/responses, the only one: items of its output, and the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cog_triton.serving.generation import GenerationResult, TextPiece
from cog_triton.serving.openai.answer_items import AnswerItems, EventChoiceBuilder, Kind
from cog_triton.serving.openai.choices import call_id
from cog_triton.serving.openai.envelope import Object, ResponseEnvelope
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import Content
from cog_triton.text.detokenize import TokenText

_TYPES = {"text": "message", "reasoning": "reasoning", "call": "function_call"}


class ResponseChoiceBuilder(EventChoiceBuilder):
    """Builder of the only answer; events are numbered."""

    def __init__(
        self,
        envelope: ResponseEnvelope,
        token_text: TokenText,
        prompt_tokens: int,
        parser: AnswerParser | None = None,
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        """`namespaces` has the namespace and the name of each tool in one, by its full name."""
        super().__init__(envelope, token_text, prompt_tokens, parser)
        self._response = envelope
        self._items = ResponseItems(namespaces)

    def first_chunks(self, result: GenerationResult) -> list[Object]:
        begun = self._response.response("in_progress", [], None)
        return self._response.numbered(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        )

    def chunks(self, piece: TextPiece) -> list[Object]:
        return self._response.numbered(self._items.feed(self._parse(piece.text)))

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        status, events = self._finish(result)
        response = self._response.response(status, self._items.output, self._usage(result))
        return self._response.numbered(
            [*events, {"type": f"response.{status}", "response": response}]
        )

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
        status = "incomplete" if self._finish_reason(result) == "length" else "completed"
        return status, [*events, *self._items.close(status)]

    def unfinished(self) -> list[Object]:
        """The output of an answer that was broken off."""
        self._items.close("incomplete")
        return self._items.output


class ResponseItems(AnswerItems):
    """Builds the items of a response's `output`."""

    def __init__(self, namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> None:
        super().__init__()
        self._namespaces = namespaces

    def _start(self, kind: Kind, name: str) -> list[Object]:
        item: Object = {"type": _TYPES[kind], "status": "in_progress"}
        if kind == "call":
            namespace, name = self._namespaces.get(name, (None, name))
            item |= {"id": _id("fc"), "call_id": call_id(), "name": name, "arguments": ""}
            item |= {"namespace": namespace} if namespace else {}
        elif kind == "text":
            item |= {"id": _id("msg"), "role": "assistant", "content": []}
        else:
            item |= {"id": _id("rs"), "summary": [], "content": []}
        self.output.append(item)
        self._open = item
        events = [self._item_event("response.output_item.added", {**item})]
        if kind != "call":
            part = _part(kind, "")
            events.append(self._event("response.content_part.added", content_index=0, part=part))
        return events

    def _delta(self, text: str) -> Object:
        match self._kind:
            case "text":
                name, values = "output_text", {"content_index": 0, "logprobs": []}
            case "reasoning":
                name, values = "reasoning_text", {"content_index": 0}
            case _:
                name, values = "function_call_arguments", {}
        return self._event(f"response.{name}.delta", delta=text, **values)

    def _end(self, kind: Kind, text: str, status: str) -> list[Object]:
        item = self._open
        item["status"] = status
        done = self._item_event("response.output_item.done", item)
        if kind == "call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            return [self._event(name, arguments=text, name=item["name"]), done]
        part = _part(kind, text)
        item["content"] = [part]
        values = {"text": text, **({"logprobs": []} if kind == "text" else {})}
        return [
            self._event(f"response.{part['type']}.done", content_index=0, **values),
            self._event("response.content_part.done", content_index=0, part=part),
            done,
        ]

    def _event(self, kind: str, **values: Any) -> Object:
        place = len(self.output) - 1
        return {"type": kind, "item_id": self._open["id"], "output_index": place, **values}

    def _item_event(self, kind: str, item: Object) -> Object:
        return {"type": kind, "output_index": len(self.output) - 1, "item": item}


def _part(kind: Kind, text: str) -> Object:
    if kind == "text":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
