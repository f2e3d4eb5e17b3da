"""Streams outlive `kill -9` of vLLM's engine: all are whole, and their texts are the same.

Of every class of sampling, of LoRA adapters, and with images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_models
import pytest
from gpu_servers import Card, Server, drawn, of_bytes, served
from gpu_streams import GREEDY, TOKENS, TOP, Asked, Streams, completion

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("name", "place", "note")},
    "required": ["name", "place", "note"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "tale", "schema": SCHEMA}}
REGEX = {"regex": r"[a-z]{9}( [a-h]{5}){12}, ([a-z]+ )*\."}
DRAWN = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
COUNTED = {"frequency_penalty": 0.7, "presence_penalty": 0.4}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "greedy": GREEDY,
    "seed": {**DRAWN, "seed": 4242},
    "seed, top_k": {"temperature": 1, "top_k": 50, "seed": 77, "ignore_eos": True},
    "penalties": {**GREEDY, **COUNTED},
    "penalties, seed": {**DRAWN, **COUNTED, "repetition_penalty": 1.1, "seed": 5},
    "min_tokens": {"temperature": 0, "min_tokens": TOKENS - 20},
    "JSON schema": {"temperature": 0.8, "seed": 9, "response_format": JSON},
    "regex": {"temperature": 0.8, "seed": 3, "structured_outputs": REGEX},
}
UNGUIDED = ("greedy", "seed", "seed, top_k", "penalties", "penalties, seed", "min_tokens")
MADE_UP = ("greedy", "seed", "seed, top_k", "penalties, seed")
"""Classes for made-up weights, which end neither a JSON nor an expression.

Penalties count token ids; several of the tokens that such weights choose have the same text.
"""

Engine = Callable[[Path, Path, Card], Path]


def plain(name: str, number: int) -> Asked:
    return completion(number, CLASSES[name])


def adapted(name: str, number: int) -> Asked:
    models = ("model", *gpu_models.ADAPTERS)
    return completion(number, CLASSES[name], models[number % len(models)])


def seeing(name: str, number: int) -> Asked:
    image = {"url": gpu_models.image_url((number, 255 - number, 60))}
    parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": f"Tale {number}:"}]
    body = {"model": "model", "messages": [{"role": "user", "content": parts}]}
    asked = {"max_tokens": TOKENS, "logprobs": True, "top_logprobs": TOP, **CLASSES[name]}
    return "/v1/chat/completions", {**body, **asked}


def plain_engine(directory: Path, smollm2: Path, card: Card) -> Path:
    if card.rehearsal:
        return of_bytes(directory)
    return gpu_models.engine_of(smollm2, directory, card.arguments())


def adapted_engine(directory: Path, smollm2: Path, card: Card) -> Path:
    return gpu_models.with_adapters(smollm2, directory, card.arguments())


def seeing_engine(directory: Path, smollm2: Path, card: Card) -> Path:
    mark = "\x01" if card.rehearsal else gpu_models.IMAGE
    return gpu_models.of_images(directory, card.arguments(), mark)


KINDS: dict[str, tuple[Callable[[str, int], Asked], Engine, Sequence[str], Sequence[float]]] = {
    "every class": (plain, plain_engine, tuple(CLASSES), (0.1, 0.6)),
    "adapters": (adapted, adapted_engine, UNGUIDED, (0.3,)),
    "images": (seeing, seeing_engine, MADE_UP, (0.3,)),
}
"""What is asked, of which engine, in which classes, and parts of a run at which it is killed."""


@pytest.mark.parametrize("kind", KINDS)
def test_streams_outlive_a_killed_engine_with_the_same_text(
    kind: str, card: Card, smollm2: Path, tmp_path: Path
) -> None:
    body, engine, classes, killed_at = KINDS[kind]
    directory = engine(tmp_path / "engine", smollm2, card)
    count = 4 if card.rehearsal else 32
    named = [(name, body(name, number)) for name in classes for number in range(count)]
    with served(Server(tmp_path / "work", directory, card, RESUME="1", **drawn(card))) as server:
        streams = Streams(server, [asked for _, asked in named])
        assert "takes tokens as output" in server.logs()
        for part in killed_at:
            found = streams.kill(part)
            objects = [
                set(json.loads(told.text))
                for (name, _), told in zip(named, found, strict=True)
                if name == "JSON schema" and told.end == "stop"
            ]
            assert objects == [{"name", "place", "note"}] * len(objects)
