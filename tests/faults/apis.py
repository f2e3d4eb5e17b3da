"""Requests of every API and their answers, each held against what is promised for its kind.

The promises are those of docs/supervision.md (What goes on). A kind that an engine cannot do is
left out for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cog_triton import errors
from cog_triton.bench.http_client import BufferedResponse
from cog_triton.bench.request_record import Record
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


class Answer(BufferedResponse):
    """One answer, as it arrives; `record` has its times, of streams also those of reads with text.

    `error` has the text of an error, and `broken` how the connection ended too early. `user` is the
    number of the client that asked.
    """

    def __init__(
        self, kind: Kind, engine: str, question: Question, sent: float, user: int = 0
    ) -> None:
        super().__init__()
        self.kind, self.engine, self.question, self.user = kind, engine, question, user
        self.record = Record(index=user, scheduled=sent, sent=sent)
        self.said = ""
        self.pieces = 0
        self.told: int | None = None
        self.error: str | None = None
        self.broken: str | None = None
        self.streamed = kind.streamed
        self._splitter = EventSplitter()

    def request(self, model: str) -> dict[str, Any]:
        """The body to send."""
        body = self.kind.api.body(self.question, model, self.streamed)
        values = body["input"] if "input" in body and self.kind.api is PREDICTIONS else body
        values.update(self.kind.values)
        return body

    def body(self, data: bytes, at: float) -> None:
        """Receive a part of the body; see `BufferedResponse`."""
        if not self.streamed or self.status != 200:
            super().body(data, at)
            return
        before = len(self.said)
        for event in self._splitter.feed(data):
            payload = event_data(event)
            if payload and payload != b"[DONE]":
                self._take(json.loads(payload))
        if len(self.said) > before:
            self.record.output(at, 1)

    def end(self, at: float, broken: str | None = None) -> None:
        """Take the end of the connection's use."""
        self.record.ended, self.broken = at, broken
        if broken is None and self.status != 200:
            self.error = self.text.decode("utf-8", "replace")
        elif broken is None and not self.streamed:
            self._take(json.loads(self.text))

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
        if equal and known is not None and not known.startswith(self.said):
            return WRONG
        if self.broken is not None:
            return self.broken if self.broken in (HUNG, LEFT) else CUT
        if self.error is not None:
            found = errors.from_text(self.error)
            may_end = found and found.code == "E2105" and self.engine in self.kind.ends
            return ENDED if may_end else found.code if found else UNCODED
        if self.kind.form is not None:
            return COMPLETE if self.kind.form(self.said) else WRONG
        if self.told != self.question.tokens and self.kind.api is not TRITON:  # which tells none
            return WRONG
        if known is None or self.said == known:
            return COMPLETE
        return WRONG if equal else OTHER

    def __str__(self) -> str:
        known, got = self.question.known(self.kind.flavour) or "", self.said
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
        answer.said += data["chunk"] if in_turn else f"[piece {data['index']}]"
    elif data.get("status") == "succeeded":
        answer.told = data["metrics"]["output_token_count"]
        whole = "".join(data["output"])
        if not answer.streamed:
            answer.said = whole
        elif whole != answer.said:
            answer.said += f"[whole output: {whole[-_SHOWN:]}]"


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
        answer.said += said.get("text") or said.get("content") or ""
        for call in said.get("tool_calls") or ():
            answer.said += call["function"].get("arguments") or ""
    if data.get("usage"):
        answer.told = data["usage"]["completion_tokens"]


def _ask_responses(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    values = {"input": question.prompt, "max_output_tokens": question.tokens}
    return {"model": model, "temperature": 0, "ignore_eos": True, "stream": streamed, **values}


def _take_responses(answer: Answer, data: Mapping[str, Any]) -> None:
    if data.get("type") == "response.output_text.delta":
        answer.said += data["delta"]
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
            answer.said = text
        elif text != answer.said:
            answer.said += f"[whole output: {text[-_SHOWN:]}]"


def _ask_messages(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    asked = [{"role": "user", "content": question.prompt}]
    values = {"messages": asked, "max_tokens": question.tokens, "temperature": 0}
    return {"model": model, "stream": streamed, **values}


def _take_messages(answer: Answer, data: Mapping[str, Any]) -> None:
    """Deltas of text, and the usage at the end; without a stream all at once."""
    answer.said += data.get("delta", {}).get("text") or ""
    if not answer.streamed:
        answer.said = "".join(part["text"] for part in data["content"])
    if data.get("usage") and (not answer.streamed or data["type"] == "message_delta"):
        answer.told = data["usage"]["output_tokens"]


def _ask_triton(question: Question, model: str, streamed: bool) -> dict[str, Any]:
    lengths = {"max_tokens": question.tokens, "min_length": question.tokens}
    return {"text_input": question.prompt, "stream": True, "temperature": 0, **lengths}


def _take_triton(answer: Answer, data: Mapping[str, Any]) -> None:
    # Where the text ends amid a character, Triton's clients get a mark for what there is of it.
    answer.said += data["text_output"].rstrip("\N{REPLACEMENT CHARACTER}")


PREDICTIONS = Api("/predictions", _ask_cog, _take_cog)
COMPLETIONS = Api("/v1/completions", _ask_completions, _take_choices)
CHAT = Api("/v1/chat/completions", _ask_chat, _take_choices)
RESPONSES = Api("/v1/responses", _ask_responses, _take_responses)
MESSAGES = Api("/v1/messages", _ask_messages, _take_messages)
TRITON = Api("/v2/models/ensemble/generate_stream", _ask_triton, _take_triton)
SAMPLED, PENALTIES, LORA, CHATTED = "sampled", "penalties", "LoRA", "chat"
ADAPTER, ADAPTER_RANK = "late", 3
"""Adapter of the mock: its text begins as many tokens later as the rank is."""
SEEDED: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 7}
_BOTH, _MOCK, _MODEL = ("mock", "openvino"), ("mock",), ("openvino",)
_REPETITION = {"repetition_penalty": 1.1}
_PENALTIES = {**_REPETITION, "frequency_penalty": 0.3, "presence_penalty": 0.3}
_COLORS = ("red", "green", "blue")
_SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": _COLORS}, "big": {"type": "boolean"}},
    "required": ["color", "big"],
    "additionalProperties": False,
}
_FREE = {"max_tokens": 64, "ignore_eos": False}
_AS_JSON = {
    **_FREE,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
}
_CALL = {
    **_FREE,
    "tools": [{"type": "function", "function": {"name": "paint", "parameters": _SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "paint"}},
}


def fits_schema(text: str) -> bool:
    """Whether a text is JSON of the schema that the requests ask for."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.keys() != {"color", "big"}:
        return False
    return value["color"] in _COLORS and isinstance(value["big"], bool)


def _both_ways(name: str, api: Api, **rest: Any) -> tuple[Kind, Kind]:
    return Kind(name, api, True, **rest), Kind(f"{name}, whole", api, False, **rest)


KINDS: tuple[Kind, ...] = (
    *_both_ways("predictions", PREDICTIONS, equal=_BOTH),
    *_both_ways("completions", COMPLETIONS, equal=_BOTH),
    *_both_ways("chat", CHAT, flavour=CHATTED),
    *_both_ways("responses", RESPONSES, flavour=CHATTED),
    # Without `ignore_eos`, so that a model's answers have lengths of their own.
    *_both_ways("messages", MESSAGES, flavour=CHATTED, engines=_MOCK),
    Kind("Triton's generate_stream", TRITON, True, equal=_BOTH, ends=_BOTH),
    *_both_ways("predictions, seed", PREDICTIONS, flavour=SAMPLED, values=SEEDED, equal=_BOTH),
    Kind("chat, seed", CHAT, True, flavour="chat sampled", values=SEEDED),
    Kind("predictions, repetition penalty", PREDICTIONS, True, PENALTIES, _REPETITION),
    Kind("completions, penalties", COMPLETIONS, True, PENALTIES, _PENALTIES),
    Kind("completions, LoRA", COMPLETIONS, True, LORA, {"model": ADAPTER}, engines=_MOCK),
    *(
        kind
        for name, values in (("chat, JSON schema", _AS_JSON), ("chat, tools", _CALL))
        for kind in _both_ways(
            name, CHAT, flavour=name, values=values, engines=_MODEL, form=fits_schema
        )
    ),
)  # fmt: skip
FLAVOURS = {kind.flavour for kind in KINDS}


def of_engine(engine: str) -> list[Kind]:
    """Kinds that an engine can do."""
    return [kind for kind in KINDS if engine in kind.engines]


def plain(path: str, engine: str) -> Kind:
    """Kind of a path whose greedy text streams."""
    fits = (kind for kind in of_engine(engine) if kind.streamed and kind.api.path == path)
    return next(kind for kind in fits if kind.flavour in (PLAIN, CHATTED))
