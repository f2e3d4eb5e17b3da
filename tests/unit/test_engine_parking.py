"""Spare engines are parked and taken back, over the double of vLLM."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import vllm_engine

from cog_triton.engines.engine_link import EngineLink
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import EngineNotParked, EngineNotRestored
from cog_triton.ipc.streams import Server, Stream
from cog_triton.keeper.engine_parking import EngineParking
from cog_triton.keeper.keeper_messages import PARKABLE, Attach, EngineSpec
from cog_triton.keeper.kept_engine import EngineState, KeptEngine
from cog_triton.text.sampling import SamplingParams

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"
PATIENCE_S = 60
pytestmark = pytest.mark.usefixtures("vllm_environment")
Scenario = Callable[[KeptEngine, EngineParking], Awaitable[None]]


def run(directory: Path, scenario: Scenario, **arguments: Any) -> None:
    """Run `scenario` on an engine that is ready; `arguments` are those of ``model.json``."""
    sleeps = str(arguments.pop("sleeps", True)).lower()
    engine_dir = vllm_engine(directory / "engine", gpu_memory_utilization=0.5, **arguments)
    parameters = {"engine_dir": str(engine_dir), PARKABLE: sleeps}

    async def main() -> None:
        name = f"cog-triton-test-{secrets.token_hex(8)}"
        engine: KeptEngine | None = None

        async def accept(stream: Stream) -> None:
            attach = await stream.receive()
            assert isinstance(attach, Attach)
            assert engine is not None
            await engine.attached(attach.pid, stream)

        server = Server(name, accept)
        engine = KeptEngine(1, EngineSpec.of(HOST, parameters), name, directory)
        parking = EngineParking()
        try:
            await engine.wait_until_loaded()
            assert engine.state is EngineState.READY, engine.load_error()
            await scenario(engine, parking)
        finally:
            await engine.close()
            await engine.clean_up()
            server.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def tokens(engine: KeptEngine) -> list[int]:
    """Greedy tokens of one prompt."""
    client = EngineLink(engine.address, "tokens", on_end=lambda: None, on_stats=lambda stats: None)
    client.start()
    found: list[int] = []
    done = asyncio.Event()
    loop = asyncio.new_event_loop()

    def emit(event: Any) -> None:
        assert event.error is None
        found.extend(event.token_ids)
        if event.finish:
            loop.call_soon_threadsafe(done.set)

    sampling = SamplingParams(max_tokens=4)
    client.submit(1, EngineRequest(input_ids=[*b"abc"], sampling=sampling), emit)
    loop.run_until_complete(asyncio.wait_for(done.wait(), PATIENCE_S))
    loop.close()
    client.close()
    return found


def test_an_engine_is_parked_and_says_the_same_afterwards(tmp_path: Path) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        before = await asyncio.to_thread(tokens, engine)
        for _ in range(2):
            parked = await parking.park(engine)
            assert engine.parked
            assert parked.host_bytes > 10 << 20
            assert str(parked).startswith("asleep in ")
            await parking.unpark(engine)
            assert engine.parked is None
            assert engine.state is EngineState.READY
            assert await asyncio.to_thread(tokens, engine) == before == [*b"abca"]

    run(tmp_path, scenario)


def test_an_engine_that_cannot_sleep_stays(tmp_path: Path) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        with pytest.raises(EngineNotParked, match="without vLLM's enable_sleep_mode"):
            await parking.park(engine)
        assert engine.state is EngineState.READY
        assert await asyncio.to_thread(tokens, engine) == [*b"abca"]

    run(tmp_path, scenario, sleeps=False)


def test_a_parked_engine_that_has_died_is_not_taken_back(tmp_path: Path) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        await parking.park(engine)
        assert engine.pid is not None
        os.kill(engine.pid, 9)
        await engine.wait_until_dead()
        with pytest.raises(EngineNotRestored):
            await parking.unpark(engine)

    run(tmp_path, scenario)
