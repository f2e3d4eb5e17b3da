"""Spare engines: they take over, and are parked if their family can be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from started_fleet import StartedFleet, says, started, until
from step_engines import ENGINE
from vllm_engines import vllm_engine
from vllm_hosts import ABC, HOST

from cog_triton.engines.engine_spec import SPARE_LOADS, EngineSpec
from cog_triton.processes import engine_child, engine_fleet

pytestmark = pytest.mark.usefixtures("vllm_environment")
Logged = Callable[[str], None]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Waits until a text is in the log."""
    caplog.set_level("DEBUG", "cog_triton")
    return lambda text: until(lambda: text in caplog.text)


def of_vllm(tmp_path: Path, loads: str = "beside") -> EngineSpec:
    """Of an engine whose spare loads beside it, or first."""
    directory = vllm_engine(tmp_path / "engine")
    return EngineSpec.of(HOST, {"engine_dir": str(directory), SPARE_LOADS: loads})


def kill(fleet: StartedFleet) -> None:
    """Kill the engine that serves, and wait until another does."""
    assert says(fleet.client, ABC) == [*b"abca"]
    os.kill(fleet.pid(), signal.SIGKILL)
    fleet.death()
    assert says(fleet.client, ABC) == [*b"abca"]


def test_a_parked_spare_takes_over_and_is_replaced(tmp_path: Path, logged: Logged) -> None:
    with started(tmp_path, of_vllm(tmp_path), spare=True) as fleet:
        for spare in (2, 3):
            logged(f"spare engine {spare} is parked: asleep in ")
            kill(fleet)
            assert fleet.serving().number == spare
            logged(f"engine {spare} is back in ")


def test_a_spare_is_parked_first_if_two_engines_have_no_room(
    tmp_path: Path, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path, of_vllm(tmp_path, "first"), spare=True) as fleet:
        assert fleet.serving().number == 2
        parked = caplog.text.index("spare engine 1 is parked: asleep in ")
        assert parked < caplog.text.index("engine process 2 starts")
        kill(fleet)
        assert fleet.serving().number == 1
        logged("engine 1 is back in ")
        logged("spare engine 3 is parked: asleep in ")  # beside it, once there is room


def test_a_spare_that_cannot_be_parked_is_ready(
    tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, EngineSpec.of(ENGINE, {"max_batch_size": "4"}), spare=True) as fleet:
        logged("spare engine 2 is ready")
        memory = fleet.fleet.memory()
        assert min(memory["leased"], memory["spare"]) > 5e6  # each has Python and numpy
        monkeypatch.setattr(engine_fleet, "_SPARE_DELAY_S", 1e6)
        for successor in (2, 3):  # which is not started yet
            os.kill(fleet.pid(), signal.SIGKILL)
            fleet.death()
            assert says(fleet.client, [7]) == [8, 9, 10, 11]
            assert fleet.serving().number == successor


def test_a_spare_that_has_no_room_in_host_memory_is_ready(tmp_path: Path, logged: Logged) -> None:
    spec = of_vllm(tmp_path)
    os.truncate(tmp_path / "engine" / "model.safetensors", 1 << 43)
    with started(tmp_path, spec, spare=True) as fleet:
        logged("spare engine 2 stays on the GPU: E2110 ")
        kill(fleet)
        assert fleet.serving().number == 2


@pytest.mark.parametrize(("loads", "serving"), [("beside", 1), ("first", 2)])
def test_a_spare_that_does_not_fall_asleep_is_the_last(
    loads: str, serving: int, tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_child, "_SLEEP_S", 0.0)
    monkeypatch.setattr(engine_fleet, "_SPARE_DELAY_S", 0.0)
    with started(tmp_path, of_vllm(tmp_path, loads), spare=True) as fleet:
        logged("no spare engine any more: E2111 ")
        assert fleet.serving().number == serving
        until(lambda: (spare := fleet.fleet._spare) is None or spare.done())
        kill(fleet)
        assert fleet.serving().number == 3
        assert fleet.run(fleet.fleet.wait_until_serving()) == {0: 2}


def test_a_spare_that_does_not_wake_up_is_replaced(
    tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_child, "_WAKE_S", 0.0)
    with started(tmp_path, of_vllm(tmp_path), spare=True) as fleet:
        logged("spare engine 2 is parked")
        kill(fleet)
        logged("spare engine 2 does not wake up: E2111 ")
        assert fleet.serving().number == 3


def test_a_parked_spare_that_dies_is_replaced(tmp_path: Path, logged: Logged) -> None:
    with started(tmp_path, of_vllm(tmp_path), spare=True) as fleet:
        logged("spare engine 2 is parked")
        (spare,) = fleet.call(lambda: fleet.fleet._living - {fleet.fleet._serving[0]})
        os.kill(spare._pid, signal.SIGKILL)
        logged("spare engine 3 is parked")
        kill(fleet)
        assert fleet.serving().number == 3
