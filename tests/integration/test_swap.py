"""Two models behind one GPU: a request's `model` decides whose engine has it."""

from __future__ import annotations

import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from cuda_driver import CudaDriver, has_compiler
from stack import processes_of, wait_until
from vllm_stack import VLLMStack

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]
PATIENCE_S = 120


def engine(directory: Path, name: str) -> str:
    """An engine that takes nearly all of a GPU, and is called `name`."""
    made = directory / name
    made.mkdir()
    arguments = {"model": "../weights", "max_model_len": 4096, "gpu_memory_utilization": 0.9}
    (made / "model.json").write_text(json.dumps(arguments))
    return str(made)


def ask(stack: VLLMStack, model: str, tokens: int = 8) -> str:
    body = {"model": model, "prompt": "Tale: ", "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{stack.own}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def streamed(stack: VLLMStack, model: str, tokens: int, begun: threading.Event) -> str:
    body = {"model": model, "prompt": "Tale: ", "max_tokens": tokens, "stream": True}
    url = f"{stack.own}/v1/completions"
    text = ""
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                begun.set()
    return text


def test_models_take_turns_on_the_gpu(tmp_path: Path) -> None:
    driver = CudaDriver(tmp_path / "driver")
    environment = {"SWAP_RESIDENCE": "0.5", "VLLM_DOUBLE_DELAY": "0.02", **driver.environment}
    stack = VLLMStack(tmp_path, loras=False, MAX_QUEUE="2", **environment)
    stack.command = [*stack.command[:4], engine(tmp_path, "a"), engine(tmp_path, "b"), "--swap"]

    def states() -> list[str]:
        return sorted(state for state, _ in driver.processes().values())

    with stack.served(), ThreadPoolExecutor(8) as pool:
        listed = httpx.get(f"{stack.own}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]
        assert states() == ["CHECKPOINTED", "RUNNING"]
        text = ask(stack, "a")
        for model in ("b", "a", "b"):
            assert ask(stack, model) == text
            assert states() == ["CHECKPOINTED", "RUNNING"]

        # A long stream of one ends undisturbed while the other one waits for its turn.
        begun = threading.Event()
        long = pool.submit(streamed, stack, "b", 200, begun)
        assert begun.wait(PATIENCE_S)
        waits = [pool.submit(ask, stack, "a") for _ in range(2)]
        assert long.result(PATIENCE_S) == ("Tale: " * 200)[:200]
        assert [wait.result(PATIENCE_S) for wait in waits] == [text, text]

        unknown = httpx.post(f"{stack.own}/v1/completions", json={"model": "c", "prompt": "x"})
        assert unknown.status_code == 404
        assert "E1009" in unknown.text
        metrics = httpx.get(f"{stack.own}/metrics").text
        swaps = dict(re.findall(r'cog_triton_swaps_total\{model="(\w)"\} (\d+)', metrics))
        assert (int(swaps["a"]), int(swaps["b"])) == (2, 2)

        # Stopped amid a swap, with the driver hanging: whoever waits is told, nothing is left.
        driver.fail(("checkpoint", 0, "hang"))
        count = len(driver.calls)
        body = {"model": "b", "prompt": "Tale: "}
        url = f"{stack.own}/v1/completions"
        refused = pool.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
        wait_until(lambda: any(call == "checkpoint" for call, _ in driver.calls[count:]))
        code, output = stack.finish(signal.SIGTERM)
        assert code == 0, output
        answer = refused.result(PATIENCE_S)
        assert (answer.status_code, "E2105" in answer.text) == (503, True)
        wait_until(lambda: not processes_of(stack.work_dir))
