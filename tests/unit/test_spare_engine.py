"""Spare engines of the keeper: they take over, and are parked where their family can be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest
from cuda_driver import TOTAL_BYTES, CudaDriver, has_compiler
from started_keeper import Keeper, keeping, until
from step_engines import ENGINE
from vllm_engines import vllm_engine
from vllm_hosts import ABC, ask, token_ids, tokens

from cog_triton.engines.engine_client import EngineClient, leased_engines
from cog_triton.errors import TritonUnavailable
from cog_triton.keeper.keeper_messages import SPARE_LOADS, EngineSpec

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"
pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]


@pytest.fixture
def keeper(driver: CudaDriver, tmp_path: Path) -> Iterator[Keeper]:
    with keeping(tmp_path, spare=True) as keeper:
        yield keeper


def leased(keeper: Keeper, loads: str, share: float) -> EngineClient:
    """An engine that takes `share` of the GPU, while its spare loads beside it or first."""
    directory = keeper.directory / "engine"
    vllm_engine(directory, gpu_memory_utilization=share)
    parameters = {"engine_dir": str(directory), SPARE_LOADS: loads}
    return leased_engines(keeper.client.name, EngineSpec.of(HOST, parameters))


def by_state(driver: CudaDriver, state: str) -> set[int]:
    return {
        pid
        for pid, (found, _) in driver.processes().items()
        if found == state and Path(f"/proc/{pid}").exists()
    }


def alone(driver: CudaDriver, state: str, but: int = 0) -> int:
    """The only process in a state, once there is one other than `but`."""
    (pid,) = until(lambda: by_state(driver, state) - {but})
    return int(pid)


def says(engine: EngineClient, prompt: list[int] = ABC) -> list[int]:
    """Tokens of a request, sent until one is not lost with an engine that was killed."""

    def answered() -> list[int] | None:
        events = ask(engine, tokens(prompt, max_tokens=4))  # type: ignore[arg-type]
        lost = isinstance(events[-1].error, TritonUnavailable)
        return None if lost else token_ids(events)

    found: list[int] = until(answered)
    return found


def test_a_parked_spare_takes_over_and_is_replaced(keeper: Keeper, driver: CudaDriver) -> None:
    engine = leased(keeper, "beside", 0.4)
    first = spare = 0
    for _ in range(2):
        serving = alone(driver, "RUNNING", but=first)
        assert serving == (spare or serving)
        spare = alone(driver, "CHECKPOINTED", but=spare)
        assert says(engine) == [*b"abca"]
        os.kill(serving, signal.SIGKILL)
        assert says(engine) == [*b"abca"]
        assert driver.processes()[spare] == ("RUNNING", ceil(TOTAL_BYTES * 0.4))
        first = serving
    engine.close()


def test_a_spare_is_parked_first_where_two_engines_have_no_room(
    keeper: Keeper, driver: CudaDriver
) -> None:
    engine = leased(keeper, "first", 0.9)
    serving, spare = alone(driver, "RUNNING"), alone(driver, "CHECKPOINTED")
    assert serving > spare
    os.kill(serving, signal.SIGKILL)
    assert says(engine) == [*b"abca"]
    assert by_state(driver, "RUNNING") == {spare}
    log = keeper.directory / "keeper.log"
    until(lambda: "no spare engine: " in log.read_text())  # there is no room beside it
    assert says(engine) == [*b"abca"]
    engine.close()


def test_a_spare_that_cannot_be_parked_is_ready(keeper: Keeper) -> None:
    path = keeper.directory / "pid"
    spec = EngineSpec.of(ENGINE, {"max_batch_size": "4", "pid_file": str(path)})
    engine = leased_engines(keeper.client.name, spec)
    log = keeper.directory / "keeper.log"
    first = path.read_text()
    until(lambda: "spare engine 2 is ready" in log.read_text())
    spare = path.read_text()
    assert spare != first
    memory = until(keeper.client.engine_memory)
    assert min(memory["leased"], memory["spare"]) > 5e6  # each has Python and numpy
    os.kill(int(first), signal.SIGKILL)
    assert says(engine, [7]) == [8, 9, 10, 11]
    assert Path(f"/proc/{spare}").exists()
    until(lambda: "spare engine 3 is ready" in log.read_text())
    engine.close()


def test_a_spare_that_the_driver_loses_is_given_up(keeper: Keeper, driver: CudaDriver) -> None:
    driver.fail(("checkpoint", 0, 999))
    engine = leased(keeper, "beside", 0.4)
    log = keeper.directory / "keeper.log"
    until(lambda: "no spare engine any more: " in log.read_text())
    assert says(engine) == [*b"abca"]
    os.kill(alone(driver, "RUNNING"), signal.SIGKILL)
    assert says(engine) == [*b"abca"]
    engine.close()


def test_a_parked_spare_that_dies_is_replaced(keeper: Keeper, driver: CudaDriver) -> None:
    engine = leased(keeper, "beside", 0.4)
    spare = alone(driver, "CHECKPOINTED")
    os.kill(spare, signal.SIGKILL)
    assert alone(driver, "CHECKPOINTED", but=spare) != spare
    assert says(engine) == [*b"abca"]
    engine.close()
