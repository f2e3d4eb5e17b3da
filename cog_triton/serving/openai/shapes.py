"""Shapes of answers: what each API sends of them, as events or whole. Here chats and completions.

Shapes follow OpenAI's reference, "The chat completion (chunk) object" and "The completion object".
"""

from __future__ import annotations

import json
import secrets
import string
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from json.encoder import encode_basestring
from typing import Any, ClassVar, NamedTuple

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
