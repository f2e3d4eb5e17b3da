"""Engines outlive their server in the parking lot, for one later server that wants the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_driver import CudaDriver, has_compiler
from started_keeper import Keeper
from step_engines import ENGINE
from vllm_engines import vllm_engine
from vllm_hosts import ask, token_ids, tokens

from cog_triton.backend.leased_engine import LeasedEngine
from cog_triton.errors import InvalidArgument
from cog_triton.keeper import parking_lot
from cog_triton.keeper.adoption import ParkingPlace
from cog_triton.keeper.keeper_messages import EngineSpec
from cog_triton.keeper.lot_messages import Description
from cog_triton.keeper.parking_lot import ParkingLot
from cog_triton.keeper.sleep_messages import SPARE_LOADS
from cog_triton.system import reaper

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"
PATIENCE_S = 60
pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]


def until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


class Server:
    """What a server has of the lot: a keeper, and the lease of an engine."""

    def __init__(self, lot: ParkingLot, directory: Path, spec: EngineSpec, **identity: str) -> None:
        self.lot = lot
        self.name = lot.open()
        directory.mkdir(exist_ok=True)
        place = ParkingPlace(lot.directory.parent, self.name, "toy", {"toy": "1", **identity})
        self.keeper = Keeper(directory, place=place)
        self.keeper.start()
        self._spec = spec
        self.engine: LeasedEngine | None = None

    @property
    def adopted(self) -> str:
        """Name of the keeper that it has, in the lot."""
        return self.keeper.client.name.rpartition("-")[2]

    def says(self, prompt: int) -> list[int]:
        if self.engine is None:
            self.engine = LeasedEngine(self.keeper.client.name, self._spec)
        return token_ids(ask(self.engine, tokens([prompt], max_tokens=3)))  # type: ignore[arg-type]

    def stop(self, *, keep: bool = True) -> None:
        if keep:
            self.lot.keep(self.adopted)
        if self.engine is not None:
            self.engine.close()
        self.keeper.close()


@pytest.fixture
def lot(tmp_path: Path) -> Iterator[ParkingLot]:
    lot = ParkingLot(tmp_path / "work")
    yield lot
    for entry in lot.entries():
        until(lambda name=entry.name: state(lot, name) != "serving")
        lot.drop(entry)
    assert list(lot.entries()) == []


def state(lot: ParkingLot, name: str) -> str:
    held = lot.describe(name)
    return held.state if held else ""


def kept(lot: ParkingLot, name: str) -> Description:
    """What is kept by a keeper, once its server has left it."""
    until(lambda: state(lot, name) not in ("serving", "parking"))
    held = lot.describe(name)
    assert held is not None
    return held


def counting(tmp_path: Path) -> EngineSpec:
    return EngineSpec.of(ENGINE, {"max_batch_size": "4", "pid_file": str(tmp_path / "pid")})


def vllm(tmp_path: Path) -> EngineSpec:
    directory = vllm_engine(tmp_path / "engine", gpu_memory_utilization=0.9)
    return EngineSpec.of(HOST, {"engine_dir": str(directory), SPARE_LOADS: "first"})


def test_an_engine_outlives_its_server_for_the_next_one(lot: ParkingLot, tmp_path: Path) -> None:
    spec = counting(tmp_path)
    first = Server(lot, tmp_path / "one", spec)
    assert first.says(7) == [8, 9, 10]
    first.stop()
    held = kept(lot, first.name)
    assert (held.state, held.model, held.gpus) == ("loaded", "toy", "")
    assert held.pid == int((tmp_path / "pid").read_text())
    assert held.host_bytes > 1 << 20
    assert abs(held.since - time.time()) < PATIENCE_S

    second = Server(lot, tmp_path / "two", spec)
    assert second.adopted == first.name
    assert second.says(7) == [8, 9, 10]
    assert int((tmp_path / "pid").read_text()) == held.pid  # nothing was loaded
    second.stop(keep=False)
    until(lambda: not Path(f"/proc/{held.pid}").exists())
    until(lambda: lot.describe(first.name) is None)


def test_an_engine_is_parked_off_the_gpu_and_taken_back(
    lot: ParkingLot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CudaDriver(tmp_path / "driver")
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    spec = vllm(tmp_path)
    name, pid = "", None
    for round_ in range(3):
        server = Server(lot, tmp_path / "run", spec)
        assert server.says(ord("a")) == [*b"aaa"]
        if round_:
            assert server.adopted == name
            assert driver.processes()[pid or 0][0] == "RUNNING"
        name = server.adopted
        server.stop()
        held = kept(lot, name)
        assert (held.state, held.gpus, held.note) == ("parked", "all", "")
        pid = held.pid or 0
        assert driver.processes()[pid][0] == "CHECKPOINTED"
    assert [found for found, _ in driver.processes().values()] == ["CHECKPOINTED"]


def test_an_old_driver_leaves_the_engine_asleep(
    lot: ParkingLot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = CudaDriver(tmp_path / "old", api=12040)
    monkeypatch.setenv("LD_LIBRARY_PATH", old.environment["LD_LIBRARY_PATH"])
    server = Server(lot, tmp_path / "run", vllm(tmp_path))
    assert server.says(ord("a")) == [*b"aaa"]
    server.stop()
    held = kept(lot, server.name)
    assert held.state == "asleep"
    assert "the driver is one of CUDA 12.4" in held.note


def test_an_engine_that_cannot_be_parked_ends(
    lot: ParkingLot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CudaDriver(tmp_path / "driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", driver.environment["LD_LIBRARY_PATH"])
    driver.fail(("checkpoint", 0, 999))
    server = Server(lot, tmp_path / "run", vllm(tmp_path))
    assert server.says(ord("a")) == [*b"aaa"]
    (pid,) = driver.processes()
    server.stop()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert "E2111" in kept(lot, server.name).note


def test_another_engine_is_not_taken_over_and_why_is_logged(
    lot: ParkingLot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = Server(lot, tmp_path / "one", counting(tmp_path), max_model_len="4096")
    first.says(7)
    first.stop()
    kept(lot, first.name)
    second = Server(lot, tmp_path / "two", counting(tmp_path), max_model_len="8192")
    assert second.adopted == second.name
    why = f"parked as {first.name} is another one: max_model_len is '4096' there and '8192' here"
    assert why in caplog.text
    second.stop(keep=False)
    assert state(lot, first.name) == "loaded"


def test_of_two_servers_at_once_one_gets_the_engine(
    lot: ParkingLot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = Server(lot, tmp_path / "one", counting(tmp_path))
    first.says(7)
    first.stop()
    kept(lot, first.name)
    both = [Server(lot, tmp_path / name, counting(tmp_path)) for name in ("two", "three")]
    assert [server.adopted for server in both] == [first.name, both[1].name]
    assert "is not to be had: another server has it" in caplog.text
    (entry,) = [one for one in lot.entries() if one.name == first.name]
    with pytest.raises(InvalidArgument, match="stop that server instead"):
        lot.drop(entry)
    assert [server.says(7) for server in both] == [[8, 9, 10]] * 2
    for server in both:
        server.stop(keep=False)


def test_a_server_that_fails_to_start_leaves_the_engine(lot: ParkingLot, tmp_path: Path) -> None:
    first = Server(lot, tmp_path / "one", counting(tmp_path))
    first.says(7)
    first.stop()
    since = kept(lot, first.name).since
    failing = Server(lot, tmp_path / "two", counting(tmp_path))
    assert failing.adopted == first.name
    failing.stop(keep=False)
    held = kept(lot, first.name)
    assert (held.state, held.since) == ("loaded", since)


def test_a_parked_engine_that_dies_is_forgotten(lot: ParkingLot, tmp_path: Path) -> None:
    first = Server(lot, tmp_path / "one", counting(tmp_path))
    first.says(7)
    first.stop()
    pid = kept(lot, first.name).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: lot.describe(first.name) is None)
    second = Server(lot, tmp_path / "two", counting(tmp_path))
    assert second.adopted == second.name
    assert second.says(7) == [8, 9, 10]
    second.stop(keep=False)


def test_a_keeper_that_is_killed_takes_its_engine_along(lot: ParkingLot, tmp_path: Path) -> None:
    first = Server(lot, tmp_path / "one", counting(tmp_path))
    first.says(7)
    first.stop()
    held = kept(lot, first.name)
    below = reaper.descendants(held.root)
    assert held.pid in below
    (keeper,) = [pid for pid in below if b"lot_keeper" in command(pid)]
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))


def test_a_keeper_that_hangs_is_dropped(
    lot: ParkingLot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking_lot, "_ANSWER_S", 1.0)
    monkeypatch.setattr(parking_lot, "_GRACE_S", 1.0)
    first = Server(lot, tmp_path / "one", counting(tmp_path))
    first.says(7)
    first.stop()
    held = kept(lot, first.name)
    (keeper,) = [p for p in reaper.descendants(held.root) if b"lot_keeper" in command(p)]
    os.kill(keeper, signal.SIGSTOP)
    (entry,) = lot.entries()
    assert entry.description is None
    lot.drop(entry)
    until(lambda: not Path(f"/proc/{held.pid}").exists())
    assert not entry.directory.exists()


def test_the_lot_is_for_its_user_alone(lot: ParkingLot) -> None:
    name = lot.open()
    for directory in (lot.directory, lot.directory / name):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_secrets_do_not_stay_with_an_engine(
    lot: ParkingLot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COG_TRITON_API_KEY", "of-the-starter")
    opened = lot.describe(lot.open())
    assert opened is not None
    for pid in (opened.root, *reaper.descendants(opened.root)):
        assert b"of-the-starter" not in Path(f"/proc/{pid}/environ").read_bytes()
    monkeypatch.delenv("COG_TRITON_API_KEY")
    monkeypatch.setenv("COG_TRITON_DRAIN_FILE", "of-the-server")
    server = Server(lot, tmp_path / "one", counting(tmp_path))
    server.says(7)
    server.stop()
    held = kept(lot, server.name)
    assert b"of-the-server" not in Path(f"/proc/{held.pid}/environ").read_bytes()


def command(pid: int) -> bytes:
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"" if b"reaper.py" in line else line
