"""Answers of every API's clients, each held against what is promised for its kind of request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cog_triton import errors
from cog_triton.text.sse import EventSplitter, event_data

COMPLETE, OTHER, WRONG, CUT, HUNG, UNCODED, LEFT = (
    *("complete", "other text", "wrong text", "cut off", "hung", "without a code", "left"),
)
ENDED = "E2105 as promised"
GOOD = (COMPLETE, OTHER, ENDED, LEFT)
"""Outcomes that break no promise; OTHER is whole and valid, and another text than undisturbed."""
PLAIN = "greedy"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the length of its answer in tokens, and the greedy text of so many.

    `texts` has the texts of other flavours of requests, None where one is not known.
    """

    prompt: str
    tokens: int
    text: str
    texts: Mapping[str, str | None] = field(default_factory=dict)

    def known(self, flavour: str) -> str | None:
        """Text of a flavour on an undisturbed server; None if it is not known."""
        return self.texts.get(flavour, self.text if flavour == PLAIN else None)


@dataclass(frozen=True, slots=True)
class Api:
    """Path of an API, the body to send to it (streamed or not), and how its data are taken."""

    path: str
    body: Callable[[Question, str, bool], dict[str, Any]]
    take: Callable[[Answer, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: its API, what it asks beyond plain text, and what is promised for it.

    On engines of `equal` it ends in the known text, on others in a text that is whole and, with
    `form`, of that form; on engines of `ends` it may end with E2105 instead, once there is a token.
    """

    name: str
    api: Api
    streamed: bool
    flavour: str = PLAIN
    values: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = ("mock", "openvino")
    equal: tuple[str, ...] = ("mock",)
    ends: tuple[str, ...] = ()
    form: Callable[[str], bool] | None = None


class Answer:
    """One answer (`BufferedResponse`); times are seconds of the monotonic clock.

    `reads` has each read that brought text, of streams; `error` the text of an error, and `broken`
    how the connection ended too early.
    """

    def __init__(self, kind: Kind, engine: str, question: Question, sent: float) -> None:
        self.kind, self.engine, self.question, self.sent = kind, engine, question, sent
        self.ended: float | None = None
        self.reads: list[float] = []
        self.text = ""
        self.pieces = 0
        self.told: int | None = None
        self.error: str | None = None
        self.broken: str | None = None
        self.streamed = kind.streamed
        self._status = 0
        self._body = b""
        self._splitter = EventSplitter()

    def request(self, model: str) -> dict[str, Any]:
        """The body to send."""
        body = self.kind.api.body(self.question, model, self.streamed)
        values = body["input"] if "input" in body and self.kind.api is PREDICTIONS else body
        values.update(self.kind.values)
        return body

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `BufferedResponse.begin`."""
        self._status = status

    def body(self, data: bytes, at: float) -> None:
        """See `BufferedResponse.body`."""
        if not self.streamed or self._status != 200:
            self._body += data
            return
        before = len(self.text)
        for event in self._splitter.feed(data):
            payload = event_data(event)
            if payload and payload != b"[DONE]":
                self._take(json.loads(payload))
        if len(self.text) > before:
            self.reads.append(at)

    def end(self, at: float, broken: str | None = None) -> None:
        """Take the end of the connection's use."""
        self.ended, self.broken = at, broken
        if broken is None and self._status != 200:
            self.error = self._body.decode("utf-8", "replace")
        elif broken is None and not self.streamed:
            self._take(json.loads(self._body))

    def _take(self, data: Mapping[str, Any]) -> None:
        if data.get("error"):
            self.error = str(data["error"])
        else:
            self.kind.api.take(self, data)

    @property
    def outcome(self) -> str:
        """COMPLETE, the code of its error, or one of the other outcomes above."""
        known = self.question.known(self.kind.flavour)
        equal = self.engine in self.kind.equal
        if equal and known is not None and not known.startswith(self.text):
            return WRONG
        if self.broken is not None:
            return self.broken if self.broken in (HUNG, LEFT) else CUT
        if self.error is not None:
            found = errors.from_text(self.error)
            may_end = found and found.code == "E2105" and self.engine in self.kind.ends
            return ENDED if may_end else found.code if found else UNCODED
        if self.kind.form is not None:
            return COMPLETE if self.kind.form(self.text) else WRONG
        if self.told != self.question.tokens and self.kind.api is not TRITON:  # which tells none
            return WRONG
        if known is None or self.text == known:
            return COMPLETE
        return WRONG if equal else OTHER

    def __str__(self) -> str:
        known, got = self.question.known(self.kind.flavour) or "", self.text
        differ = (n for n, pair in enumerate(zip(known, got, strict=False)) if len({*pair}) > 1)
        same = next(differ, min(len(known), len(got)))
        return (
            f"{self.kind.name}, {self.outcome}: {len(got)} of {len(known)} characters,"
            f" {self.told} of {self.question.tokens} tokens; {self.error or self.broken!r:.200};"
            f" then {got[same : same + _SHOWN]!r} instead of {known[same : same + _SHOWN]!r}"
        )


def _ask_cog(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    values = {"prompt": question.prompt, "max_tokens": question.tokens}
    return {"input": {**values, "min_tokens": question.tokens, "temperature": 0}}


def _take_cog(answer: Answer, data: Mapping[str, Any]) -> None:
    """Pieces are numbered, and the end of a stream has all of them again."""
    if "chunk" in data:
        in_turn = data["index"] == answer.pieces
        answer.pieces += 1
        answer.text += data["chunk"] if in_turn else f"[piece {data['index']}]"
    elif data.get("status") == "succeeded":
        answer.told = data["metrics"]["output_token_count"]
        whole = "".join(data["output"])
        if not answer.streamed:
            answer.text = whole
        elif whole != answer.text:
            answer.text += f"[whole output: {whole[-_SHOWN:]}]"


def _ask_completions(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    usage = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    values = {"prompt": question.prompt, "max_tokens": question.tokens}
    return {"model": model, "temperature": 0, "ignore_eos": True, **values, **usage}


def _ask_chat(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    body = _ask_completions(question, model, streamed)
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return body


def _take_choices(answer: Answer, data: Mapping[str, Any]) -> None:
    """Text of a completion, or content and arguments of calls of a chat."""
    for choice in data["choices"]:
        said = choice.get("delta") or choice.get("message") or choice
        answer.text += said.get("text") or said.get("content") or ""
        for call in said.get("tool_calls") or ():
            answer.text += call["function"].get("arguments") or ""
    if data.get("usage"):
        answer.told = data["usage"]["completion_tokens"]


def _ask_responses(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    values = {"input": question.prompt, "max_output_tokens": question.tokens}
    return {"model": model, "temperature": 0, "ignore_eos": True, "stream": streamed, **values}


def _take_responses(answer: Answer, data: Mapping[str, Any]) -> None:
    if data.get("type") == "response.output_text.delta":
        answer.text += data["delta"]
        return
    whole = data.get("response", data)
    if whole.get("error"):
        answer.error = str(whole["error"])
    elif data.get("type") == "error":
        answer.error = str(data)
    elif whole.get("usage"):
        answer.told = whole["usage"]["output_tokens"]
        parts = (part for item in whole["output"] for part in item["content"])
        text = "".join(part["text"] for part in parts)
        if not answer.streamed:
            answer.text = text
        elif text != answer.text:
            answer.text += f"[whole output: {text[-_SHOWN:]}]"


def _ask_messages(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    asked = [{"role": "user", "content": question.prompt}]
    values = {"messages": asked, "max_tokens": question.tokens, "temperature": 0}
    return {"model": model, "stream": streamed, **values}


def _take_messages(answer: Answer, data: Mapping[str, Any]) -> None:
    """Deltas of text, and the usage at the end; without a stream all at once."""
    answer.text += data.get("delta", {}).get("text") or ""
    if not answer.streamed:
        answer.text = "".join(part["text"] for part in data["content"])
    if data.get("usage") and (not answer.streamed or data["type"] == "message_delta"):
        answer.told = data["usage"]["output_tokens"]


def _ask_triton(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    lengths = {"max_tokens": question.tokens, "min_length": question.tokens}
    return {"text_input": question.prompt, "stream": True, "temperature": 0, **lengths}


def _take_triton(answer: Answer, data: Mapping[str, Any]) -> None:
    # Where the text ends amid a character, Triton's clients get a mark for what there is of it.
    answer.text += data["text_output"].rstrip("\N{REPLACEMENT CHARACTER}")


PREDICTIONS = Api("/predictions", _ask_cog, _take_cog)
COMPLETIONS = Api("/v1/completions", _ask_completions, _take_choices)
CHAT = Api("/v1/chat/completions", _ask_chat, _take_choices)
RESPONSES = Api("/v1/responses", _ask_responses, _take_responses)
MESSAGES = Api("/v1/messages", _ask_messages, _take_messages)
TRITON = Api("/v2/models/ensemble/generate_stream", _ask_triton, _take_triton)
