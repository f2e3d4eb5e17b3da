"""Engines that faults are tried on: how each is served, and questions with known answers."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from engine_fixtures import MockText
from lora_adapters import adapter

from cog_triton.engines.mock import mock_directory
from faults.apis import ADAPTER, ADAPTER_RANK, FLAVOURS, LORA, SAMPLED, SEEDED, Question
from faults.strikes import DRAIN_S, own_clock
from faults.target import Start, Target

ENGINE_TAR = Path(__file__).parents[2] / "engine.tar"
_PATIENCE_S = 300
_LINES, _AT_ONCE, _LEAST = 8, 16, 24
_TOPICS = (
    *("the sea", "rivers", "bread", "the moon", "trains", "winter", "bees", "glass", "maps"),
    *("a lighthouse", "chess", "salt", "clocks", "mountains", "a violin", "paper", "ships"),
    *("the desert", "tea", "bridges", "owls", "iron", "the harvest", "letters", "gardens"),
    *("a market", "horses", "rain", "the library", "lamps", "wool", "islands", "a well"),
    *("stars", "coins", "the forest", "a painter", "doors", "kites", "the post"),
)
LEAST_PROBABILITY = 0.55
"""Of every token of a text that is compared: the next best is 0.2 nats below it, at least. A
token's logits differ in their last digits by batch, and between prompt and step."""
_BUSY = """
import os
parent = os.getppid()
os.nice(5)
while os.getppid() == parent:
    sum(range(1 << 18))
"""
"""Computes until its parent has gone."""


def _of_mock(urls: Mapping[str, str], model: str, seed: int, count: int = 200) -> list[Question]:
    """Questions to the mock, which says one text at any prompt."""
    rng = random.Random(seed)
    with TemporaryDirectory() as directory:
        said = MockText(mock_directory.make_engine(Path(directory)))

    def known(tokens: int) -> str:
        return said(tokens).rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that has not ended

    first = len(known(ADAPTER_RANK))
    return [
        Question(
            "Tell me about the sea.",
            size,
            known(size),
            {**dict.fromkeys(FLAVOURS, known(size)), LORA: known(size + ADAPTER_RANK)[first:]},
        )
        for size in (rng.randint(25, 100) for _ in range(count))
    ]


def _of_model(urls: Mapping[str, str], model: str, seed: int) -> list[Question]:
    """Questions with the texts of an undisturbed server, but those that it is not sure of.

    A prompt is a numbered list, which the model continues: at other prompts a small model is
    hardly ever as sure of all its tokens as LEAST_PROBABILITY.
    """
    rng = random.Random(seed)
    prompts = ["".join(f"{line}. {topic}\n" for line in range(1, _LINES)) for topic in _TOPICS]
    with httpx.Client(timeout=_PATIENCE_S) as http, ThreadPoolExecutor(_AT_ONCE) as pool:

        def choice(**values: Any) -> Any:
            answer = http.post(f"{urls['v1']}/v1/completions", json={"model": model, **values})
            return answer.raise_for_status().json()["choices"][0]

        def ask(prompt: str, tokens: int) -> tuple[Question, float]:
            asked = {"prompt": prompt, "max_tokens": tokens}
            greedy = choice(**asked, ignore_eos=True, temperature=0, logprobs=0)
            # As predictions have it, which know no ignore_eos.
            sampled = choice(**asked, **SEEDED, min_tokens=tokens)
            least = math.exp(min(greedy["logprobs"]["token_logprobs"]))
            return Question(prompt, tokens, greedy["text"], {SAMPLED: sampled["text"]}), least

        found = list(pool.map(ask, prompts, [rng.randint(6, 14) for _ in prompts]))
    sure = [question for question, probability in found if probability >= LEAST_PROBABILITY]
    if len(sure) < _LEAST:
        raise RuntimeError(f"{model} is sure of {len(sure)} texts, {_LEAST} are needed")
    return sure


@dataclass(frozen=True, slots=True)
class Profile:
    """How an engine is started, and questions to it; answers take some 1 to 4 s undisturbed.

    An image gets `image` in place of `argument`. `questions` takes base URLs, the model's name and
    a seed.
    """

    argument: str
    image: Mapping[str, str]
    environment: Mapping[str, str]
    questions: Callable[[Mapping[str, str], str, int], list[Question]]
    has_adapter: bool = False


PROFILES = {
    "mock": Profile(
        "--engine=mock",
        {"COG_TRITON_ENGINE": "mock"},
        {"MOCK_STEP_MS": "40"},
        _of_mock,
        has_adapter=True,
    ),
    "openvino": Profile(
        str(ENGINE_TAR),
        {"COG_WEIGHTS": str(ENGINE_TAR)},
        {"PROMPT_TEMPLATE": "{prompt}"},  # as /v1/completions has it
        _of_model,
    ),
}


def questions(engine: str, target: Target, seed: int) -> list[Question]:
    """Questions with known answers."""
    return PROFILES[engine].questions(target.urls, target.server.model(), seed)


@contextmanager
def prepared(
    engine: str, *, has_clock: bool = False, as_image: bool = False, busy: int = 0
) -> Iterator[Start]:
    """How to start a server; what it needs lasts as long as the block."""
    profile = PROFILES[engine]
    environment = {"DRAIN_TIMEOUT": str(DRAIN_S), **profile.environment}
    environment |= profile.image if as_image else {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="cog-triton-setup-")))
        if has_clock:
            environment |= own_clock(directory)
        if profile.has_adapter:
            adapter(directory / ADAPTER, ADAPTER_RANK)
            config = directory / "serve.yaml"
            config.write_text(f"lora_adapters: {{{ADAPTER}: {ADAPTER}}}")
            environment["COG_TRITON_CONFIG"] = str(config)
        for _ in range(busy):
            child = subprocess.Popen([sys.executable, "-S", "-c", _BUSY])
            stack.callback(child.wait)
            stack.callback(child.kill)
        yield Start((profile.argument,), environment, as_image)
