"""Kinds of requests in flight: a row each, with what is promised when the engine dies amid them.

The promises are those of docs/supervision.md (What goes on). A kind that an engine cannot do is
left out for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from faults.answers import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PLAIN,
    PREDICTIONS,
    RESPONSES,
    TRITON,
    Api,
    Kind,
)

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


def left_out(engine: str) -> str:
    """Names of the kinds that it cannot do, by semicolon; empty if it can do all."""
    return "; ".join(kind.name for kind in KINDS if engine not in kind.engines)


def plain(path: str, engine: str) -> Kind:
    """Kind of a path whose greedy text streams."""
    fits = (kind for kind in of_engine(engine) if kind.streamed and kind.api.path == path)
    return next(kind for kind in fits if kind.flavour in (PLAIN, CHATTED))
