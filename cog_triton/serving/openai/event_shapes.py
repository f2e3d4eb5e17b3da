"""Shapes of APIs whose events have names: responses and messages, each of one answer.

Shapes follow OpenAI's reference, "The response object", and Anthropic's, "Messages".
"""

from __future__ import annotations

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from cog_triton.errors import CogTritonError
from cog_triton.serving.generation import GenerationResult, TextPiece
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.parsers.call_parser import CallStart, Content, Delta, Reasoning
from cog_triton.serving.openai.shapes import Answer, Object, Shape, Usage, call_id, sse_event

Kind = Literal["text", "reasoning", "call"]


class EventShape(Shape):
    """Shape of the only answer: items of one kind each, in their order.

    An item is open until one of another kind, or the end, closes it.
    """

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.output: list[Object] = []
        self._item: Object = {}
        self._kind: Kind | None = None
        self._texts: list[str] = []

    def events(self, answer: Answer, piece: TextPiece, usage: Usage | None) -> bytes:
        return self._sent(self._grown(answer.feed(piece.text)))

    def done(self, usage: Usage) -> bytes:
        return b""

    def _sent(self, events: Iterable[Object]) -> bytes:
        return b"".join(map(named_event, events))

    def _grown(self, deltas: Iterable[Delta]) -> list[Object]:
        """The events of these deltas."""
        events: list[Object] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                events += self._opened("call", delta.name)
                continue
            if isinstance(delta, Content | Reasoning):
                kind: Kind = "text" if isinstance(delta, Content) else "reasoning"
                events += self._opened(kind) if kind != self._kind else []
            self._texts.append(delta.text)
            events.append(self._delta(delta.text))
        return events

    def _opened(self, kind: Kind, name: str = "") -> list[Object]:
        events = self._closed()
        self._kind = kind
        return [*events, *self._start(kind, name)]

    def _closed(self, status: str = "completed") -> list[Object]:
        """The events of the end of the open item, if there is one; `status` is how it ended."""
        if (kind := self._kind) is None:
            return []
        text, self._texts, self._kind = "".join(self._texts), [], None
        return self._end(kind, text, status)

    @abstractmethod
    def _start(self, kind: Kind, name: str) -> list[Object]:
        """The events of a new item, which becomes `_item`; `name` is of a call."""

    @abstractmethod
    def _delta(self, text: str) -> Object:
        """The event of more text of the open item."""

    @abstractmethod
    def _end(self, kind: Kind, text: str, status: str) -> list[Object]:
        """The events of the end of `_item`, whose whole text is known."""


class ResponseShape(EventShape):
    """Shape of a response; its events are numbered.

    `echoed` are fields of its request that it repeats, `namespaces` has the namespace and the name
    of each tool in one, by its full name.
    """

    endpoint, prefix = "responses", "resp"
    _TYPES: ClassVar[Mapping[Kind, str]] = {
        "text": "message",
        "reasoning": "reasoning",
        "call": "function_call",
    }

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.echoed: Object = {}
        self.namespaces: Mapping[str, tuple[str, str]] = {}
        self.made: Object = {}
        """The last response object."""
        self.error: CogTritonError | None = None
        """Why it failed."""
        self._number = 0

    def first(self, answer: Answer, usage: Usage) -> bytes:
        begun = self.response("in_progress", [], None)
        kinds = "response.created", "response.in_progress"
        return self._sent({"type": kind, "response": begun} for kind in kinds)

    def closing(self, answer: Answer, result: GenerationResult, usage: Usage) -> bytes:
        status, events = self._finished(answer.rest(), answer, result)
        response = self.response(status, self.output, usage)
        return self._sent([*events, {"type": f"response.{status}", "response": response}])

    def failure(self, error: CogTritonError) -> bytes:
        self.error = error
        body = error_responses.error_body(error)
        return self._sent([{**body["error"], **body, "type": "error"}])

    def whole(self, answers: Sequence[tuple[Answer, GenerationResult]], usage: Usage) -> Object:
        ((answer, result),) = answers
        status, _ = self._finished([*answer.deltas, *answer.rest()], answer, result)
        return self.response(status, self.output, usage)

    def unfinished(self) -> list[Object]:
        """The output of an answer that was broken off."""
        self._closed("incomplete")
        return self.output

    def response(self, status: str, output: list[Object], usage: Usage | None) -> Object:
        """The response object, which becomes `made`."""
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
            "usage": usage
            and {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.output,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.output,
            },
            **self.echoed,
        }
        return self.made

    def _finished(
        self, deltas: Iterable[Delta], answer: Answer, result: GenerationResult
    ) -> tuple[str, list[Object]]:
        """The status, and the events of the last items; at least one is made."""
        events = self._grown(deltas)
        if not self.output:
            events += self._grown([Content("")])
        status = "incomplete" if answer.finish_reason(result) == "length" else "completed"
        return status, [*events, *self._closed(status)]

    def _sent(self, events: Iterable[Object]) -> bytes:
        numbered = []
        for event in events:
            numbered.append({**event, "sequence_number": self._number})
            self._number += 1
        return super()._sent(numbered)

    def _start(self, kind: Kind, name: str) -> list[Object]:
        item: Object = {"type": self._TYPES[kind], "status": "in_progress"}
        match kind:
            case "call":
                namespace, name = self.namespaces.get(name, (None, name))
                item |= {"id": _id("fc"), "call_id": call_id(), "name": name, "arguments": ""}
                item |= {"namespace": namespace} if namespace else {}
            case "text":
                item |= {"id": _id("msg"), "role": "assistant", "content": []}
            case "reasoning":
                item |= {"id": _id("rs"), "summary": [], "content": []}
        self.output.append(item)
        self._item = item
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
        item = self._item
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
        return {"type": kind, "item_id": self._item["id"], "output_index": place, **values}

    def _item_event(self, kind: str, item: Object) -> Object:
        return {"type": kind, "output_index": len(self.output) - 1, "item": item}


class MessageShape(EventShape):
    """Shape of a message; of the strings that end its text, the `stops` of the request are sent.

    Clients add cached tokens to `input_tokens`. A call whose arguments were cut is in the events
    only: they are no JSON object.
    """

    endpoint, prefix = "messages", "msg"
    _BEGUN: ClassVar[Object] = dict.fromkeys(
        ("stop_reason", "stop_sequence", "stop_details", "container")
    )
    _DELTAS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text": ("text_delta", "text"),
        "thinking": ("thinking_delta", "thinking"),
        "tool_use": ("input_json_delta", "partial_json"),
    }

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.stops: Collection[str] = ()
        self._blocks = 0

    def first(self, answer: Answer, usage: Usage) -> bytes:
        begun = self._message([], self._BEGUN, usage)
        return self._sent([{"type": "message_start", "message": begun}, {"type": "ping"}])

    def closing(self, answer: Answer, result: GenerationResult, usage: Usage) -> bytes:
        events = [*self._grown(answer.rest()), *self._closed()]
        end = {"delta": self._ended(answer, result), "usage": _message_usage(usage)}
        return self._sent([*events, {"type": "message_delta", **end}, {"type": "message_stop"}])

    def failure(self, error: CogTritonError) -> bytes:
        return self._sent([error_responses.error_body(error, path=error_responses.MESSAGES)])

    def whole(self, answers: Sequence[tuple[Answer, GenerationResult]], usage: Usage) -> Object:
        ((answer, result),) = answers
        self._grown([*answer.deltas, *answer.rest()])
        self._closed()
        return self._message(self.output, self._ended(answer, result), usage)

    def _message(self, content: list[Object], end: Object, usage: Usage) -> Object:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **end, "usage": _message_usage(usage)}

    def _ended(self, answer: Answer, result: GenerationResult) -> Object:
        """Why it ended; calls come before a stop string, as they are what the client acts on."""
        if answer.finish_reason(result) == "length":
            return {**self._BEGUN, "stop_reason": "max_tokens"}
        if answer.parser is not None and answer.parser.called:
            return {**self._BEGUN, "stop_reason": "tool_use"}
        if (stop := result.stop_string) in self.stops:
            return {**self._BEGUN, "stop_reason": "stop_sequence", "stop_sequence": stop}
        return {**self._BEGUN, "stop_reason": "end_turn"}

    def _start(self, kind: Kind, name: str) -> list[Object]:
        match kind:
            case "text":
                block: Object = {"type": "text", "text": "", "citations": []}
            case "reasoning":  # Anthropic signs what only its own models may be given back
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                block = {"type": "tool_use", "id": call_id(), "name": name, "input": {}}
                block["caller"] = {"type": "direct"}
        self._item = block
        self._blocks += 1
        return [self._event("content_block_start", content_block={**block})]

    def _delta(self, text: str) -> Object:
        kind, name = self._DELTAS[self._item["type"]]
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _end(self, kind: Kind, text: str, status: str) -> list[Object]:
        block, events = self._item, [self._event("content_block_stop")]
        if kind == "call":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        if kind == "reasoning":
            signed: Object = {"type": "signature_delta", "signature": ""}
            events.insert(0, self._event("content_block_delta", delta=signed))
        if block.get("input", {}) is not None:
            self.output.append(block)
        return events

    def _event(self, kind: str, **values: Object) -> Object:
        return {"type": kind, "index": self._blocks - 1, **values}


def named_event(event: Object) -> bytes:
    """The server-sent event of an object, which has its name."""
    return f"event: {event['type']}\n".encode() + sse_event(event)


def _message_usage(usage: Usage) -> Object:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def _part(kind: Kind, text: str) -> Object:
    if kind == "text":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _arguments(text: str) -> Object | None:
    """The arguments of a call, None if they were cut."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
