"""Generations outlive vLLM: its EngineCore dies under streams, and then the process around it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from stack import processes_of, wait_until
from vllm_stack import VLLMStack

pytestmark = pytest.mark.integration

STREAMS, TOKENS = 8, 600
PATIENCE_S = 180


def prompt_of(number: int) -> str:
    return f"Tale {number}: "


def completion(stack: VLLMStack, number: int) -> Iterator[str]:
    body = {"model": "any", "prompt": prompt_of(number), "max_tokens": TOKENS, "stream": True}
    url = f"{stack.own}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                data = json.loads(line[6:])
                assert "error" not in data, data
                yield data["choices"][0]["text"]


def prediction(stack: VLLMStack, number: int) -> Iterator[str]:
    values = {"max_tokens": TOKENS, "prompt_template": "{prompt}"}
    with stack.stream(prompt_of(number), **values) as events:
        for event, data in events:
            if event == "output":
                yield data["chunk"]
    assert data["status"] == "succeeded", data


def test_no_stream_is_lost_when_vllm_dies(tmp_path: Path) -> None:
    stack = VLLMStack(tmp_path, SERVED_MODEL_NAME="any", VLLM_DOUBLE_DELAY="0.02")
    texts: defaultdict[int, str] = defaultdict(str)

    def run(number: int) -> str:
        for text in (completion, prediction)[number % 2](stack, number):
            texts[number] += text
        return texts[number]

    def core_dies() -> None:
        stack.death.touch()
        wait_until(lambda: not stack.death.exists())

    def host_dies() -> None:
        lines = processes_of(stack.work_dir).items()
        (host,) = [pid for pid, line in lines if ":VLLMHost" in line and "reaper.py" not in line]
        os.kill(host, signal.SIGKILL)

    def until_more() -> None:
        """Until all have so many tokens more that the double goes on with its own output."""
        before = [len(texts[number]) for number in range(STREAMS)]
        wait_until(lambda: all(len(texts[n]) > before[n] + 20 for n in range(STREAMS)), PATIENCE_S)

    with stack.served(), ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(run, number) for number in range(STREAMS)]
        for strike in (core_dies, host_dies):
            until_more()
            strike()
        found = [answer.result(PATIENCE_S) for answer in answers]
        told = httpx.get(f"{stack.own}/metrics", timeout=60).text
    assert found == [(prompt_of(n) * TOKENS)[:TOKENS] for n in range(STREAMS)]
    resumed = re.findall(r"^cog_triton_resumed_total\S* (\S+)$", told, re.M)
    assert sum(map(float, resumed)) == 2 * STREAMS
