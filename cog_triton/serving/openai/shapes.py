"""Shapes of answers: what each API sends of them, as events or whole.

Shapes follow OpenAI's reference, "The chat completion (chunk) object", "The completion object" and
"The response object", and Anthropic's, "Messages".
"""

from __future__ import annotations

import json
import secrets
import string
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from json.encoder import encode_basestring
from typing import Any, ClassVar, Literal, NamedTuple

from cog_triton.errors import CogTritonError
from cog_triton.serving.generation import GenerationResult, TextPiece, TokenLogProb
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.borrowed import BorrowedStream
from cog_triton.serving.openai.parsers.call_parser import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    join,
)
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


Object = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_TEXT = "\0text of a chunk\0"
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9
_json_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Shape(ABC):
    """Shape of the answers to one request, which have one id and one time.

    `model` is the base model, or the adapter that the request names.
    """

    endpoint: ClassVar[str]
    prefix: ClassVar[str]
    """Beginning of ids."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.sends_usage = self.usage_so_far = False
        """Whether a stream ends with its usage, and whether each of its events has that so far."""

    @abstractmethod
    def first(self, answer: Answer, usage: Usage) -> bytes:
        """The events before any text."""

    @abstractmethod
    def events(self, answer: Answer, piece: TextPiece, usage: Usage | None) -> bytes:
        """The events of new text; `usage` is that so far, if it is sent."""

    @abstractmethod
    def closing(self, answer: Answer, result: GenerationResult, usage: Usage) -> bytes:
        """The events after the last text of an answer."""

    @abstractmethod
    def done(self, usage: Usage) -> bytes:
        """The end of the stream, after all answers."""

    @abstractmethod
    def failure(self, error: CogTritonError) -> bytes:
        """The event that ends a stream with an error."""

    @abstractmethod
    def whole(self, answers: Sequence[tuple[Answer, GenerationResult]], usage: Usage) -> Object:
        """The complete response."""


class ChoiceShape(Shape):
    """Shape of answers that are choices, all of one object: chats and completions."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    empty: ClassVar[Object]
    """Content of the chunk that has the finish reason."""

    def first(self, answer: Answer, usage: Usage) -> bytes:
        return b""

    def events(self, answer: Answer, piece: TextPiece, usage: Usage | None) -> bytes:
        if usage is None and not (answer.log_probs or answer.echo):
            return b"".join([self._event(answer, delta) for delta in answer.feed(piece.text)])
        return self._sent(self.chunks(answer, piece), usage)

    def closing(self, answer: Answer, result: GenerationResult, usage: Usage) -> bytes:
        rest = [self._chunk(answer, self.content(delta)) for delta in answer.rest()]
        last = self._chunk(answer, self.empty, self.finish_reason(answer, result))
        return self._sent([*rest, last], usage if self.usage_so_far else None)

    def done(self, usage: Usage) -> bytes:
        last = {**self._object(self.chunk_object, []), "usage": _usage(usage)}
        return sse_event(last) + _DONE if self.sends_usage else _DONE

    def failure(self, error: CogTritonError) -> bytes:
        return sse_event(error_responses.error_body(error))

    def whole(self, answers: Sequence[tuple[Answer, GenerationResult]], usage: Usage) -> Object:
        choices: list[Object] = []
        for answer, result in answers:
            choice = {"index": len(choices), **self.choice(answer)}
            choices.append({**choice, "finish_reason": self.finish_reason(answer, result)})
        return {**self._object(self.whole_object, choices), "usage": _usage(usage)}

    @abstractmethod
    def content(self, delta: Delta) -> Object:
        """What a chunk has of a delta."""

    @abstractmethod
    def chunks(self, answer: Answer, piece: TextPiece) -> list[Object]:
        """The chunks of new text with its log probabilities."""

    @abstractmethod
    def choice(self, answer: Answer) -> Object:
        """The content and log probabilities of a complete choice."""

    def finish_reason(self, answer: Answer, result: GenerationResult) -> str | None:
        return answer.finish_reason(result)

    def _chunk(
        self, answer: Answer, content: Object, reason: str | None = None, log_probs: Any = None
    ) -> Object:
        choice = {"index": answer.index, **content, "logprobs": log_probs, "finish_reason": reason}
        chunk = self._object(self.chunk_object, [choice])
        return {**chunk, "usage": None} if self.sends_usage else chunk

    def _object(self, kind: str, choices: list[Object]) -> Object:
        head = {"id": self.id, "created": self.created, "model": self.model}
        return {**head, "object": kind, "choices": choices}

    def _event(self, answer: Answer, delta: Delta) -> bytes:
        """The event of a delta; of those of plain text all but the text is the same."""
        if not isinstance(delta, Content):
            return sse_event(self._chunk(answer, self.content(delta)))
        if answer.frame is None:
            event = sse_event(self._chunk(answer, self.content(Content(_TEXT))))
            before, after = event.split(encode(_TEXT))
            answer.frame = before, after
        before, after = answer.frame
        return before + encode(delta.text) + after

    def _sent(self, chunks: Iterable[Object], usage: Usage | None) -> bytes:
        if usage is not None:
            chunks = [{**chunk, "usage": _usage(usage)} for chunk in chunks]
        return b"".join(map(sse_event, chunks))


class ChatShape(ChoiceShape):
    """Shape of chats."""

    endpoint, prefix = "chat", "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    empty: ClassVar[Object] = {"delta": {}}

    def first(self, answer: Answer, usage: Usage) -> bytes:
        role = self._chunk(answer, {"delta": {"role": "assistant", "content": ""}})
        return self._sent([role], usage if self.usage_so_far else None)

    def content(self, delta: Delta) -> Object:
        """See `ChoiceShape.content`; reasoning has the name of DeepSeek's API, and vLLM's."""
        match delta:
            case Content(text):
                return {"delta": {"content": text}}
            case Reasoning(text):
                return {"delta": {"reasoning": text, "reasoning_content": text}}
            case CallStart(index, name):
                return {"delta": {"tool_calls": [{"index": index, **_call(name, "")}]}}
            case CallArguments(index, text):
                call = {"index": index, "function": {"arguments": text}}
                return {"delta": {"tool_calls": [call]}}

    def chunks(self, answer: Answer, piece: TextPiece) -> list[Object]:
        made = [self._chunk(answer, self.content(delta)) for delta in answer.feed(piece.text)]
        if answer.log_probs:
            made = made or [self._chunk(answer, self.empty)]
            made[0]["choices"][0]["logprobs"] = _chat_log_probs(answer, piece.log_probs)
        return made

    def choice(self, answer: Answer) -> Object:
        """See `ChoiceShape.choice`; the content is null if there is none beside other things."""
        whole = join([*answer.deltas, *answer.rest()])
        other = whole.reasoning or whole.calls
        message: Object = {"role": "assistant", "content": whole.content or (None if other else "")}
        message |= {"refusal": None, "annotations": []}
        if whole.reasoning:
            message |= {"reasoning": whole.reasoning, "reasoning_content": whole.reasoning}
        if whole.calls:
            message["tool_calls"] = [_call(call.name, call.arguments) for call in whole.calls]
        log_probs = _chat_log_probs(answer, answer.tokens) if answer.log_probs else None
        return {"message": message, "logprobs": log_probs}


class CompletionShape(ChoiceShape):
    """Shape of completions, each of which is behind its prompt if that is echoed."""

    endpoint, prefix = "completions", "cmpl"
    whole_object = chunk_object = "text_completion"
    empty: ClassVar[Object] = {"text": ""}

    def content(self, delta: Delta) -> Object:
        return {"text": delta.text if isinstance(delta, Content) else ""}

    def chunks(self, answer: Answer, piece: TextPiece) -> list[Object]:
        echoed = self._echoed(answer, piece.prompt)
        if answer.alone or not (piece.text or piece.log_probs):
            return echoed
        found = _completion_log_probs(answer, piece.log_probs) if answer.log_probs else None
        return [*echoed, self._chunk(answer, {"text": piece.text}, log_probs=found)]

    def closing(self, answer: Answer, result: GenerationResult, usage: Usage) -> bytes:
        echoed = self._sent(self._echoed(answer, ()), usage if self.usage_so_far else None)
        return echoed + super().closing(answer, result, usage)

    def choice(self, answer: Answer) -> Object:
        text, tokens = join(answer.deltas).content, answer.tokens
        if answer.alone:
            text, tokens = "", []
        if answer.echo is not None:
            text, tokens = answer.echo.text + text, [*answer.prompt, *tokens]
        found = _completion_log_probs(answer, tokens) if answer.log_probs else None
        return {"text": text, "logprobs": found}

    def finish_reason(self, answer: Answer, result: GenerationResult) -> str | None:
        return "length" if answer.alone else result.finish_reason

    def _echoed(self, answer: Answer, log_probs: Sequence[TokenLogProb]) -> list[Object]:
        """The chunk of the prompt, before anything else."""
        echo = answer.echo
        if echo is None or answer.echoed:
            return []
        found = _completion_log_probs(answer, log_probs) if answer.log_probs else None
        answer.echoed = True
        return [self._chunk(answer, {"text": echo.text}, log_probs=found)]


def _usage(usage: Usage) -> Object:
    """The `usage` of chats and completions; details that are 0 are left out, as by vLLM."""
    found: Object = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
    }
    if usage.cached:
        found["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.reasoning:
        found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return found


def _chat_log_probs(answer: Answer, log_probs: Iterable[TokenLogProb]) -> Object:
    def shown(token_id: int, log_prob: float) -> Object:
        raw = answer.token_text(token_id)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": log_prob, "bytes": list(raw)}

    content = [
        {**shown(token_id, log_prob), "top_logprobs": [shown(*pair) for pair in top]}
        for token_id, log_prob, top in log_probs
    ]
    return {"content": content, "refusal": None}


def _completion_log_probs(answer: Answer, log_probs: Sequence[TokenLogProb]) -> Object:
    """Those of tokens that follow the ones before; `text_offset` is in characters.

    The probability of the first token of an echoed prompt is not known.
    """

    def text(token_id: int) -> str:
        return answer.token_text(token_id).decode("utf-8", "replace")

    tokens = [text(token_id) for token_id, _, _ in log_probs]
    values: list[float | None] = [value for _, value, _ in log_probs]
    # The likeliest first: of two tokens with the same text, its value stays.
    tops: list[Object | None] = [
        {text(other): value for other, value in reversed(top)} for _, _, top in log_probs
    ]
    if answer.echo is not None and not answer.echoed:
        tokens.insert(0, text(answer.echo.first_id))
        values.insert(0, None)
        tops.insert(0, None)
    offsets = list(accumulate(map(len, tokens), initial=answer.offset))
    answer.offset = offsets.pop()
    top = tops if answer.top else None
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def call_id() -> str:
    """A new id of a tool call: nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


def _call(name: str, arguments: str) -> Object:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(), "type": "function", "function": function}


def sse_event(data: Object) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def encode(value: Object | str) -> bytes:
    """JSON of a value, on one line."""
    return (encode_basestring(value) if type(value) is str else _json_encoder(value)).encode()


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
    _ITEMS: ClassVar[Mapping[Kind, tuple[str, Object]]] = {
        "text": ("msg", {"type": "message", "role": "assistant", "content": []}),
        "reasoning": ("rs", {"type": "reasoning", "summary": [], "content": []}),
        "call": ("fc", {"type": "function_call", "arguments": ""}),
    }
    """Of each kind the beginning of ids, and a new item."""
    _DELTAS: ClassVar[Mapping[Kind, tuple[str, Object]]] = {
        "text": ("response.output_text.delta", {"content_index": 0, "logprobs": []}),
        "reasoning": ("response.reasoning_text.delta", {"content_index": 0}),
        "call": ("response.function_call_arguments.delta", {}),
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
        prefix, new = self._ITEMS[kind]
        item = {**new, "status": "in_progress", "id": f"{prefix}_{secrets.token_hex(16)}"}
        if kind == "call":
            namespace, name = self.namespaces.get(name, (None, name))
            item |= {"call_id": call_id(), "name": name}
            item |= {"namespace": namespace} if namespace else {}
        self.output.append(item)
        self._item = item
        events = [self._item_event("response.output_item.added", {**item})]
        if kind != "call":
            part = _part(kind, "")
            events.append(self._event("response.content_part.added", content_index=0, part=part))
        return events

    def _delta(self, text: str) -> Object:
        name, values = self._DELTAS[self._kind or "text"]
        return self._event(name, delta=text, **values)

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


def _arguments(text: str) -> Object | None:
    """The arguments of a call, None if they were cut."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
