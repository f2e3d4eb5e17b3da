"""A step computes for much longer than a hang may last, and its engine is not restarted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from _long_model import POSITIONS, build
from resume_clients import ENGINE, Clients, Told, metric
from stack import Stack, pids_of
from vllm_stack import VLLMStack

# In one group: they would take CPU from each other.
pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.xdist_group("long_steps")]

HANG_S = 2
"""An engine whose step is overdue hangs if it sleeps for so many seconds."""
LONG, SHORT = 100_000, 8
"""Tokens of prompts."""
STEP_S = 450
"""Seconds that the step of the long prompt may take: 35 of CPU, minutes on a busy machine."""
SHAPE_S, TOKENS = 60, 200
"""Seconds that the first shape compiles, and tokens of each stream that waits for it."""


@contextmanager
def undisturbed(stack: Stack) -> Iterator[None]:
    """Fails if the engine or Triton is another process afterwards, or was restarted."""

    def pids() -> list[int]:
        return [pid for word in (ENGINE, "bin/tritonserver") for pid in pids_of(stack, word)]

    before = pids()
    assert len(before) == 2
    yield
    assert pids() == before, stack.output
    assert metric(stack, "cog_triton_engine_restarts_total") == 0


def ready_until_done(stack: Stack, answers: list[Future[Any]]) -> None:
    """Ask for the health of the server and of Triton until all answers are there."""
    while wait(answers, timeout=0.2).not_done:
        assert stack.health() == "READY", stack.output
        assert httpx.get(f"{stack.triton}/v2/health/ready", timeout=30).status_code == 200


def answered(stack: Stack, tokens: int) -> float:
    """Seconds until a prompt of so many tokens is answered."""
    body = {"model": "any", "prompt": [504] * tokens, "max_tokens": 4, "min_tokens": 4}
    began = time.monotonic()
    answer = httpx.post(f"{stack.own}/v1/completions", json=body, timeout=STEP_S)
    assert answer.status_code == 200, answer.text
    used = answer.json()["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (tokens, 4)
    return time.monotonic() - began


def test_a_prompt_of_100000_tokens_in_one_step_is_no_hang(tmp_path: Path) -> None:
    """One layer, computed by one thread: 35 s on any number of cores."""
    arguments = {"max_num_batched_tokens": POSITIONS, "num_threads": 1}
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"tensorrt_llm": {"args": arguments}}))
    settings = {"COG_TRITON_CONFIG": str(config), "SERVED_MODEL_NAME": "any"}
    settings["TRITON_TIMEOUT"] = str(STEP_S)
    stack = Stack(tmp_path / "work", str(build(tmp_path / "model", layers=1)), **settings)
    with stack.served(), undisturbed(stack), ThreadPoolExecutor() as pool:
        long = pool.submit(answered, stack, LONG)
        others = pool.submit(lambda: [answered(stack, SHORT) for _ in iter(long.done, True)])
        ready_until_done(stack, [long, others])
    assert long.result() > 5 * HANG_S
    assert max(others.result()) > 5 * HANG_S, "none of them waited for the step"


def test_a_first_shape_that_compiles_for_a_minute_is_no_hang(tmp_path: Path) -> None:
    stack = VLLMStack(
        tmp_path,
        SERVED_MODEL_NAME="any",
        VLLM_DOUBLE_SHAPE=str(SHAPE_S),
        VLLM_DOUBLE_DELAY="0.01",  # the second stream begins before the first one ends
    )
    with stack.served(), undisturbed(stack), ThreadPoolExecutor() as pool:
        clients, began = Clients(stack), time.monotonic()
        answers = [pool.submit(clients.stream, number, TOKENS) for number in (1, 2)]
        ready_until_done(stack, answers)
        took = time.monotonic() - began
    texts = [(f"Tell me {number} stories." * TOKENS)[:TOKENS] for number in (1, 2)]
    told = [Told(text, "length", TOKENS) for text in texts]
    assert [answer.result() for answer in answers] == told
    assert took > SHAPE_S
