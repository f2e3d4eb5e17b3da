"""Spare engines of the keeper: they take over, and are parked where their family can be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from started_keeper import Keeper, keeping, until
from step_engines import ENGINE
from vllm_engines import vllm_engine
from vllm_hosts import ABC, ask, token_ids, tokens

from cog_triton.engines.engine_client import EngineClient, leased_engines
from cog_triton.errors import TritonUnavailable
from cog_triton.keeper.keeper_messages import SPARE_LOADS, EngineSpec

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"
pytestmark = pytest.mark.usefixtures("vllm_environment")


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with keeping(tmp_path, spare=True) as keeper:
        yield keeper


def leased(keeper: Keeper, loads: str) -> EngineClient:
    """An engine whose spare loads beside it or first."""
    directory = keeper.directory / "engine"
    vllm_engine(directory)
    parameters = {"engine_dir": str(directory), SPARE_LOADS: loads}
    return leased_engines(keeper.client.name, EngineSpec.of(HOST, parameters))


def parked(keeper: Keeper, number: int) -> None:
    """Wait until an engine is parked."""
    log = keeper.directory / "keeper.log"
    until(lambda: f"spare engine {number} is parked: asleep in " in log.read_text())


def pid_of(keeper: Keeper, number: int) -> int:
    """The process of an engine, by its socket's name among its arguments."""
    mark = f"{keeper.client.name}-{number}".encode()
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in keeper.pids}
    (pid,) = (p for p, line in lines.items() if mark in line.split(b"\0") and b"reaper" not in line)
    return pid


def says(engine: EngineClient, prompt: list[int] = ABC) -> list[int]:
    """Tokens of a request, sent until one is not lost with an engine that was killed."""

    def answered() -> list[int] | None:
        events = ask(engine, tokens(prompt, max_tokens=4))  # type: ignore[arg-type]
        lost = isinstance(events[-1].error, TritonUnavailable)
        return None if lost else token_ids(events)

    found: list[int] = until(answered)
    return found


def test_a_parked_spare_takes_over_and_is_replaced(keeper: Keeper) -> None:
    engine = leased(keeper, "beside")
    for serving in (1, 2):
        parked(keeper, serving + 1)
        assert says(engine) == [*b"abca"]
        os.kill(pid_of(keeper, serving), signal.SIGKILL)
        assert says(engine) == [*b"abca"]
        log = (keeper.directory / "keeper.log").read_text()
        assert f"engine {serving + 1} is back in " in log
    engine.close()


def test_a_spare_is_parked_first_if_two_engines_have_no_room(keeper: Keeper) -> None:
    engine = leased(keeper, "first")
    parked(keeper, 1)
    until(lambda: "engine process 2 is leased" in (keeper.directory / "keeper.log").read_text())
    os.kill(pid_of(keeper, 2), signal.SIGKILL)
    assert says(engine) == [*b"abca"]
    assert "engine 1 is back in " in (keeper.directory / "keeper.log").read_text()
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


def test_a_parked_spare_that_dies_is_replaced(keeper: Keeper) -> None:
    engine = leased(keeper, "beside")
    parked(keeper, 2)
    os.kill(pid_of(keeper, 2), signal.SIGKILL)
    parked(keeper, 3)
    assert says(engine) == [*b"abca"]
    engine.close()
