"""A server that is stopped leaves its engine parked, and the next start on the machine has it."""

from __future__ import annotations

import os
import signal
import subprocess
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


def ask(stack: VLLMStack) -> str:
    body = {"model": "any", "prompt": "Tale: ", "max_tokens": 20, "temperature": 0}
    answer = httpx.post(f"{stack.own}/v1/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["text"])


def command(stack: VLLMStack, *arguments: str) -> str:
    line = [*stack.command[:3], "park", *arguments]
    done = subprocess.run(line, env=stack.environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_restart_takes_the_parked_engine_over(tmp_path: Path) -> None:
    driver = CudaDriver(tmp_path / "driver")
    environment = {"SERVED_MODEL_NAME": "any", "PARK_ENGINE": "1", **driver.environment}
    stack = VLLMStack(tmp_path, loras=False, **environment)
    rival = stack.twin()
    try:
        stack.start()
        stack.until_ready()
        text = ask(stack)
        (pid,) = driver.processes()
        code, output = stack.finish(signal.SIGTERM)
        assert (code, driver.processes()[pid][0]) == (0, "CHECKPOINTED"), output
        assert "The engine stays off the GPU as " in output
        name = output.rpartition("The engine stays off the GPU as ")[2][:8]
        (line,) = command(stack, "list").splitlines()[1:]
        assert [word for word in line.split() if word in (name, "any", "parked", str(pid))] == [
            *(name, "any", "parked", str(pid)),
        ]

        stack.start()  # two at once: one gets it, the other loads its own
        rival.start()
        for one in (stack, rival):
            one.until_ready()
            assert ask(one) == text
        taken = [f"parked as {name} is taken over" in one.output for one in (stack, rival)]
        assert sorted(taken) == [False, True]
        owner, other = (stack, rival) if taken[0] else (rival, stack)
        assert driver.processes()[pid][0] == "RUNNING"

        assert other.process is not None
        other.process.kill()  # not a clean stop: its engine goes with it
        other.process.wait()
        assert owner.process is not None
        owner.process.send_signal(signal.SIGTERM)
        owner.process.wait(60)
        wait_until(lambda: len(command(stack, "list").splitlines()) == 2)
        assert name in command(stack, "list")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "No engine is parked" in command(stack, "list"))
        wait_until(lambda: not processes_of(stack.work_dir))
    finally:
        rival.close()
        stack.close()
