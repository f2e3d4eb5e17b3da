"""vLLM's engine falls asleep, which frees its GPU, and wakes up, over the double of vLLM."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import DOUBLES, calls, vllm_engine

from cog_triton.engines.engine_orders import FallAsleep, WakeUp
from cog_triton.engines.vllm import engine_api, engine_sleep
from cog_triton.engines.vllm.engine_sleep import EngineSleep, parkable
from cog_triton.engines.vllm.model_directory import read_model
from cog_triton.system.host_memory import HostMemory

Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an engine in this process's event loop."""
    monkeypatch.syspath_prepend(str(DOUBLES))
    monkeypatch.setenv("VLLM_DOUBLE_JOURNAL", str(tmp_path / "journal"))

    def open_(*, sleeps: bool = True) -> tuple[Any, EngineSleep]:
        arguments = read_model(vllm_engine(tmp_path / "engine")).arguments
        arguments = parkable(arguments) if sleeps else arguments
        engine = engine_api.open_engine(arguments, lambda *_: None)
        return engine, EngineSleep(engine, arguments)

    yield open_
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def tokens(engine: Any) -> list[int]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = {"type": "token", "prompt_token_ids": [*b"abc"]}
    *_, last = [output async for output in engine.generate(prompt, params, os.urandom(4).hex())]
    return list(last.outputs[0].token_ids)


def test_it_says_the_same_after_its_sleep(opened: Open, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine, sleep = opened()
        before = await tokens(engine)
        assert (await sleep.obey(FallAsleep())).error is None
        assert await engine.is_sleeping()
        waiting = asyncio.create_task(tokens(engine))
        assert (await sleep.obey(WakeUp())).error is None
        assert await waiting == before == [*b"abca"]
        assert [call["level"] for call in calls(tmp_path / "journal", "sleep")] == [1]
        engine.shutdown()

    run(scenario())


def test_a_dead_engine_and_one_that_cannot_sleep_say_so(opened: Open) -> None:
    async def scenario() -> None:
        engine, sleep = opened(sleeps=False)
        error = (await sleep.obey(FallAsleep())).error
        assert error is not None
        assert "without vLLM's enable_sleep_mode" in error.detail
        assert not await engine.is_sleeping()
        engine.engine_core.die()
        dead = (await sleep.obey(WakeUp())).error
        assert dead is not None
        assert dead.detail.startswith("vLLM: EngineDeadError: ")
        engine.shutdown()

    run(scenario())


def test_host_memory_is_checked_before(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    little = HostMemory(3 * 10**9, "memory.max of 8.0 GB")
    monkeypatch.setattr(engine_sleep, "host_memory", lambda: little)

    async def scenario() -> None:
        engine, sleep = opened()
        error = (await sleep.obey(FallAsleep())).error
        assert error is not None
        assert "4.3 GB of host memory, and 3.0 GB are left (memory.max of 8.0 GB)" in error.detail
        assert not await engine.is_sleeping()
        assert await tokens(engine) == [*b"abca"]
        engine.shutdown()

    run(scenario())
