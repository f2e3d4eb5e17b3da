"""Questions whose answers are known: computed for the mock, recorded undisturbed for OpenVINO."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from faults.answers import Question
from faults.kinds import ADAPTER_RANK, FLAVOURS, LORA, SAMPLED, SEEDED
from faults.known_text import KnownText

_TOPICS = (
    *("the sea", "rivers", "bread", "the moon", "trains", "winter", "bees", "glass", "maps"),
    *("a lighthouse", "chess", "salt", "clocks", "mountains", "a violin", "paper", "ships"),
    *("the desert", "tea", "bridges", "owls", "iron", "the harvest", "letters", "gardens"),
    *("a market", "horses", "rain", "the library", "lamps", "wool", "islands", "a well"),
    *("stars", "coins", "the forest", "a painter", "doors", "kites", "the post"),
)
_LINES = 8
_PATIENCE_S = 300
_AT_ONCE, _LEAST = 16, 24
LEAST_PROBABILITY = 0.55
"""Of every token of a text that is compared: the next best is 0.2 nats below it, at least. A
token's logits differ in their last digits by batch, and between prompt and step."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of answers in tokens."""

    least: int
    most: int


def of_mock(lengths: Lengths, seed: int, count: int = 200) -> list[Question]:
    """Questions to the mock, which says one text at any prompt."""
    known, rng = KnownText(), random.Random(seed)
    sizes = (rng.randint(lengths.least, lengths.most) for _ in range(count))
    first = len(known(ADAPTER_RANK))
    return [
        Question(
            "Tell me about the sea.",
            size,
            known(size),
            {**dict.fromkeys(FLAVOURS, known(size)), LORA: known(size + ADAPTER_RANK)[first:]},
        )
        for size in sizes
    ]


def of_model(urls: Mapping[str, str], model: str, lengths: Lengths, seed: int) -> list[Question]:
    """Questions with the texts of an undisturbed server, but those that it is not sure of.

    A prompt is a numbered list, which the model goes on with: at other prompts a small model is
    hardly ever as sure of all its tokens as LEAST_PROBABILITY.
    """
    rng = random.Random(seed)
    prompts = ["".join(f"{line}. {topic}\n" for line in range(1, _LINES)) for topic in _TOPICS]
    sizes = [rng.randint(lengths.least, lengths.most) for _ in prompts]
    url = f"{urls['v1']}/v1/completions"
    with httpx.Client(timeout=_PATIENCE_S) as http, ThreadPoolExecutor(_AT_ONCE) as pool:
        pairs = zip(prompts, sizes, strict=True)
        asked = [pool.submit(_ask, http, url, model, *pair) for pair in pairs]
        found = [one.result() for one in asked]
    sure = [question for question, probability in found if probability >= LEAST_PROBABILITY]
    if len(sure) < _LEAST:
        raise RuntimeError(f"{model} is sure of {len(sure)} texts, {_LEAST} are needed")
    return sure


def _ask(
    http: httpx.Client, url: str, model: str, prompt: str, tokens: int
) -> tuple[Question, float]:
    """A question, and the least probability of a token of its answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    greedy = _choice(http, url, {**body, "temperature": 0, "logprobs": 0})
    # As predictions have it, which know no ignore_eos.
    sampled = _choice(http, url, {**body, **SEEDED, "ignore_eos": False, "min_tokens": tokens})
    least = min(greedy["logprobs"]["token_logprobs"])
    return Question(prompt, tokens, greedy["text"], {SAMPLED: sampled["text"]}), math.exp(least)


def _choice(http: httpx.Client, url: str, body: Mapping[str, Any]) -> Any:
    answer = http.post(url, json=body)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    return choice
