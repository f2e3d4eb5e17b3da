"""Generations outlive vLLM: its EngineCore dies under streams, and then the process around it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import REPOSITORY, pids_of, wait_until
from vllm_stack import TOKENS, VLLMStack, completion, prompt_of

pytestmark = pytest.mark.integration

STREAMS = 8
PATIENCE_S = 180


def prediction(stack: VLLMStack, number: int) -> Iterator[str]:
    values = {"max_tokens": TOKENS, "prompt_template": "{prompt}"}
    with stack.stream(prompt_of(number), **values) as events:
        for event, data in events:
            if event == "output":
                yield data["chunk"]
    assert data["status"] == "succeeded", data


def core_dies(stack: VLLMStack) -> None:
    stack.death.touch()
    wait_until(lambda: not stack.death.exists())


def host_dies(stack: VLLMStack) -> None:
    """In the double, EngineCore with it."""
    (host,) = wait_until(lambda: hosts(stack), PATIENCE_S)  # the one that comes back
    os.kill(host, signal.SIGKILL)
    wait_until(lambda: host not in hosts(stack))


def hosts(stack: VLLMStack) -> list[int]:
    return pids_of(stack, ":VLLMHost")


def test_no_stream_is_lost_when_vllm_dies(tmp_path: Path) -> None:
    stack = VLLMStack(tmp_path, SERVED_MODEL_NAME="any", VLLM_DOUBLE_DELAY="0.02")
    texts: defaultdict[int, str] = defaultdict(str)

    def run(number: int) -> str:
        for text in (completion, prediction)[number % 2](stack, number):
            texts[number] += text
        return texts[number]

    def until_more() -> None:
        """Until all have so many tokens more that the double goes on with its own output."""
        before = [len(texts[number]) for number in range(STREAMS)]
        wait_until(lambda: all(len(texts[n]) > before[n] + 20 for n in range(STREAMS)), PATIENCE_S)

    with stack.served(), ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(run, number) for number in range(STREAMS)]
        for strike in (core_dies, host_dies):
            until_more()
            strike(stack)
        found = [answer.result(PATIENCE_S) for answer in answers]
        told = httpx.get(f"{stack.own}/metrics", timeout=60).text
    assert found == [(prompt_of(n) * TOKENS)[:TOKENS] for n in range(STREAMS)]
    resumed = re.findall(r"^cog_triton_resumed_total\S* (\S+)$", told, re.M)
    assert sum(map(float, resumed)) == 2 * STREAMS


TEMPLATE = REPOSITORY / "configs" / "chat_templates" / "chatml-tools.jinja"
WORDS = r"[a-z]{9}( [a-h]{5}){12}, ([a-z]+ )*\."
NAMES = ("name", "note", "place", "end")
OBJECT = {"type": "object", "properties": {name: {"type": "string"} for name in NAMES}}
DRAWS = {"temperature": 0.8, "top_p": 0.95}
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.1}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": OBJECT}}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "tell"}}}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "tale", "schema": OBJECT}}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
CLASSES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"temperature": 0}),
    (COMPLETIONS, {**DRAWS, "seed": 4242}),
    (CHAT, {**DRAWS, "seed": 9, **PENALTIES}),
    (COMPLETIONS, {"temperature": 0, **PENALTIES, "min_tokens": 100}),
    (CHAT, {**DRAWS, "seed": 5, "response_format": AS_JSON}),
    (CHAT, {"temperature": 0, **FORCED}),
    (COMPLETIONS, {**DRAWS, "seed": 3, "structured_outputs": {"regex": WORDS}}),
    (COMPLETIONS, {**DRAWS, "seed": 8, "n": 2, "logprobs": 1}),
    (RESPONSES, {**DRAWS, "seed": 6}),
    (COMPLETIONS, {"temperature": 0, "model": "doll"}),
)


def told(stack: VLLMStack, number: int, flowing: set[int]) -> Any:
    """What a client of a class gets: text or arguments, log probabilities, usage, by choice."""
    path, values = CLASSES[number % len(CLASSES)]
    words = f"Tale {number}: "
    body = {"model": "any", "stream": True, **values}
    key = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path)
    body |= {key: words} if key else {"messages": [{"role": "user", "content": words}]}
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = 400
    if path != RESPONSES:
        body["stream_options"] = {"include_usage": True}
    parts: defaultdict[str, list[Any]] = defaultdict(list)
    with httpx.stream("POST", f"{stack.own}{path}", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            assert not data.get("error"), data
            if data.get("type") == "response.output_text.delta":
                parts["text"].append(data["delta"])
                flowing.add(number)
            elif data.get("type") == "response.completed":
                parts["usage"].append(data["response"]["usage"]["output_tokens"])
            for choice in data.get("choices", ()):
                said = choice.get("delta") or choice
                calls = said.get("tool_calls") or [{"function": {"arguments": ""}}]
                text = said.get("text") or said.get("content") or calls[0]["function"]["arguments"]
                if text:
                    flowing.add(number)
                parts[f"text {choice['index']}"].append(text)
                if choice["finish_reason"]:
                    parts["finish"].append(choice["finish_reason"])
                log_probs = choice.get("logprobs") or {}
                parts[f"log probs {choice['index']}"] += log_probs.get("token_logprobs") or []
            if data.get("usage"):
                parts["usage"].append(data["usage"]["completion_tokens"])
    return {name: "".join(map(str, values)) for name, values in parts.items()}


@pytest.mark.full
def test_streams_of_all_classes_go_on_as_they_would_have(tmp_path: Path) -> None:
    stack = VLLMStack(
        tmp_path,
        SERVED_MODEL_NAME="any",
        CHAT_TEMPLATE=str(TEMPLATE),
        VLLM_DOUBLE_DELAY="0.03",
        VLLM_DOUBLE_SAMPLES="1",
    )
    streams = 2 * len(CLASSES)

    def run(flowing: set[int]) -> Any:
        return [pool.submit(told, stack, number, flowing) for number in range(streams)]

    with stack.served(), ThreadPoolExecutor(streams) as pool:
        undisturbed = [answer.result(PATIENCE_S) for answer in run(set())]
        for answer, number in zip(undisturbed, itertools.count(), strict=False):
            assert sum(map(len, map(str, answer.values()))) > 80, (number, answer)
        flowing: set[int] = set()
        answers = run(flowing)
        wait_until(lambda: len(flowing) == streams, PATIENCE_S)
        for strike in (core_dies, host_dies, host_dies):
            strike(stack)
            flowing.clear()
            wait_until(lambda: len(flowing) > streams // 2, PATIENCE_S)
        found = [answer.result(PATIENCE_S) for answer in answers]
        refused = stack.generate(
            text_input="a",
            sampling_parameters=json.dumps({"extra_args": {"cog_triton_made": [97]}}),
            status=400,
        )
    same = [found[number] == undisturbed[number] for number in range(streams)]
    assert all(same), [(f, u) for f, u in zip(found, undisturbed, strict=True) if f != u][:2]
    assert "E1005" in refused["error"]
    assert "extra_args.cog_triton_made" in refused["error"]
    log = next(stack.work_dir.glob("run/*/server.log"), None)
    assert log is None or "takes tokens as output" in log.read_text()
