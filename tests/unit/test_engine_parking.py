"""Spare engines are parked off the GPU and taken back, over the doubles of vLLM and CUDA."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_driver import TOTAL_BYTES, CudaDriver, has_compiler
from vllm_engines import vllm_engine

from cog_triton.engines.engine_link import EngineLink
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.vllm.engine_sleep import shared_memory
from cog_triton.errors import EngineNotParked, EngineNotRestored
from cog_triton.ipc.streams import Server, Stream
from cog_triton.keeper.engine_parking import EngineParking
from cog_triton.keeper.keeper_messages import PARKABLE, Attach, EngineSpec
from cog_triton.keeper.kept_engine import EngineState, KeptEngine
from cog_triton.text.sampling import SamplingParams

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"
PATIENCE_S = 60
HALF = TOTAL_BYTES // 2
pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]
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
            parking.close()
            await engine.close()
            await engine.clean_up()
            server.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def tokens(engine: KeptEngine) -> list[int]:
    """Greedy tokens of one prompt."""
    client = EngineLink(
        engine.address, "tokens", on_end=lambda: None, on_kv_cache=lambda stats: None
    )
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


def test_an_engine_is_parked_and_says_the_same_afterwards(
    driver: CudaDriver, tmp_path: Path
) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        before = await asyncio.to_thread(tokens, engine)
        assert driver.processes() == {engine.pid: ("RUNNING", HALF)}
        for _ in range(2):
            parked = await parking.park(engine)
            assert engine.parked
            assert parked.pids == (engine.pid,)
            assert parked.host_bytes > 10 << 20
            assert str(parked).startswith("off the GPU in ")
            assert driver.processes()[parked.pids[0]][0] == "CHECKPOINTED"
            await parking.unpark(engine)
            assert engine.state is EngineState.READY
            assert driver.processes() == {engine.pid: ("RUNNING", HALF)}
            assert await asyncio.to_thread(tokens, engine) == before == [*b"abca"]

    run(tmp_path, scenario)


def test_an_engine_only_sleeps_where_the_driver_cannot_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = CudaDriver(tmp_path / "old", api=12040)
    monkeypatch.setenv("LD_LIBRARY_PATH", old.environment["LD_LIBRARY_PATH"])

    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        parked = await parking.park(engine)
        assert not parked.pids
        assert "and some of the GPU: the driver is one of CUDA 12.4" in str(parked)
        assert old.processes()[engine.pid or 0] == ("RUNNING", 1_700_000_000)
        await parking.unpark(engine)
        assert await asyncio.to_thread(tokens, engine) == [*b"abca"]

    run(tmp_path, scenario)


def test_an_engine_only_sleeps_where_that_is_wanted(
    driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        monkeypatch.setenv("PARK_CHECKPOINT", "0")
        parked = await parking.park(engine)
        assert (parked.pids, parked.reason) == ((), "PARK_CHECKPOINT=0")
        await parking.unpark(engine)
        monkeypatch.setenv("PARK_CHECKPOINT", "1")
        assert (await parking.park(engine)).pids == (engine.pid,)
        await parking.unpark(engine)
        assert await asyncio.to_thread(tokens, engine) == [*b"abca"]

    run(tmp_path, scenario)


def test_ranks_that_share_gpu_memory_only_sleep(driver: CudaDriver, tmp_path: Path) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        parked = await parking.park(engine)
        assert "ranks share GPU memory: model.json needs" in parked.reason
        assert driver.calls == []
        await parking.unpark(engine)
        assert engine.state is EngineState.READY

    run(tmp_path, scenario, tensor_parallel_size=2)


def test_an_engine_that_cannot_sleep_stays(driver: CudaDriver, tmp_path: Path) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        with pytest.raises(EngineNotParked, match="without vLLM's enable_sleep_mode"):
            await parking.park(engine)
        assert engine.state is EngineState.READY
        assert await asyncio.to_thread(tokens, engine) == [*b"abca"]

    run(tmp_path, scenario, sleeps=False)


def test_an_engine_that_the_driver_loses_is_told(driver: CudaDriver, tmp_path: Path) -> None:
    async def scenario(engine: KeptEngine, parking: EngineParking) -> None:
        await parking.park(engine)
        assert engine.pid is not None
        os.kill(engine.pid, 9)
        await engine.wait_until_dead()
        with pytest.raises(EngineNotRestored):
            await parking.unpark(engine)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        ({}, {}, None),
        ({"tensor_parallel_size": 2}, {}, "disable_custom_all_reduce"),
        ({"pipeline_parallel_size": 2}, {}, "disable_custom_all_reduce"),
        ({"apart": True}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "NCCL_NVLS_ENABLE=0"),
        ({"apart": True}, {"NCCL_NVLS_ENABLE": "0"}, "enable_nccl_comm_suspend"),
        (
            {"apart": True},
            {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
            None,
        ),
        ({"apart": True, "enable_nccl_comm_suspend": True}, {"NCCL_NVLS_ENABLE": "0"}, None),
    ],
)
def test_what_ranks_share_is_known(
    arguments: dict[str, Any], environment: dict[str, str], told: str | None
) -> None:
    if arguments.pop("apart", False):
        arguments |= {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    found = shared_memory(arguments, environment)
    assert (told is None and found is None) or (told is not None and told in str(found))
