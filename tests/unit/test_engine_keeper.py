"""Engine keeper: real engine processes, leased to clients, replaced when they die."""

from __future__ import annotations

import itertools
import math
import os
import queue
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from started_keeper import PATIENCE_S, Keeper, keeping, until
from step_engines import BROKEN, ENGINE, HANGING, SPINNING

from cog_triton.engines.engine_client import EngineClient, leased_engines
from cog_triton.engines.engine_connectors import GuestConnector
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import EngineCorrupt, TritonStartFailed, TritonUnavailable
from cog_triton.keeper import keeper_client, watchdog
from cog_triton.keeper.engine_lease import EngineLease, keeper_name, locate_engine
from cog_triton.keeper.keeper_messages import KEEPER_VARIABLE, EngineSpec
from cog_triton.keeper.watchdog import HangDetector
from cog_triton.system.process_state import process_state
from cog_triton.text.sampling import SamplingParams

FOREVER = 10**9
HANDLES = itertools.count(1)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with keeping(tmp_path) as keeper:
        yield keeper


class Owner:
    """A stub's engine, and what its requests got."""

    def __init__(self, keeper: Keeper, owner: int = 0, **parameters: str) -> None:
        self.pid_file = keeper.directory / f"pid-{next(HANDLES)}"
        values = {"max_batch_size": "4", "pid_file": str(self.pid_file), **parameters}
        self.engine = leased_engines(keeper.client.name, EngineSpec.of(ENGINE, values), owner)
        self.events: queue.Queue[TokenEvent] = queue.Queue()

    @property
    def pid(self) -> int:
        return int(self.pid_file.read_text())

    def submit(self, first: int, count: int) -> None:
        request = EngineRequest(input_ids=[first], sampling=SamplingParams(max_tokens=count))
        self.engine.submit(next(HANDLES), request, self.events.put)

    def answer(self, first: int, count: int = 3) -> list[int]:
        """Ids of a request, sent again until an engine takes it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.submit(first, count)
            events = [self.events.get(timeout=PATIENCE_S)]
            while not (events[-1].finish or events[-1].error):
                events.append(self.events.get(timeout=PATIENCE_S))
            if events[-1].error is None:
                return [token for event in events for token in event.token_ids]
            assert isinstance(events[-1].error, TritonUnavailable)
            time.sleep(0.01)
        raise AssertionError("no engine comes back")


def test_an_engine_that_died_is_replaced_and_its_requests_end_with_e2105(keeper: Keeper) -> None:
    owner = Owner(keeper)
    assert owner.answer(100) == [101, 102, 103]
    first = owner.pid
    owner.submit(7, FOREVER)
    owner.events.get(timeout=PATIENCE_S)
    os.kill(first, signal.SIGKILL)
    while (event := owner.events.get(timeout=PATIENCE_S)).error is None:
        pass
    assert isinstance(event.error, TritonUnavailable)
    assert owner.answer(100) == [101, 102, 103]
    assert owner.pid != first
    assert keeper.death() == f"the engine's process ({first}) has died"
    told = (keeper.directory / "keeper.log").read_text()
    for line in ("1 has ended", "2 starts", "2 has loaded", "2 is leased"):
        assert f"engine process {line}" in told
    owner.engine.close()


@pytest.mark.parametrize("as_wanted", [True, False])
def test_an_engine_loads_ahead_of_the_stub_that_wants_it(as_wanted: bool, tmp_path: Path) -> None:
    wanted = EngineSpec.of(ENGINE, {"max_batch_size": "4"})
    with keeping(tmp_path, wanted if as_wanted else replace(wanted, python="python3")) as keeper:
        until(lambda: "engine process 1 starts" in (tmp_path / "keeper.log").read_text())
        lease = EngineLease(keeper.client.name, wanted)
        lease.obtain()
        told = (tmp_path / "keeper.log").read_text()
        assert f"engine process {1 if as_wanted else 2} is leased" in told
        assert ("engine process 2 starts" in told) == (not as_wanted)
        second = EngineLease(keeper.client.name, wanted)
        second.obtain()
        assert "engine process 3 is leased" in (tmp_path / "keeper.log").read_text() or as_wanted
        for each in (lease, second):
            each.release()


def test_an_engine_that_does_not_load_ahead_is_not_loaded_again(tmp_path: Path) -> None:
    broken = EngineSpec.of(ENGINE, {"corrupt": "x.bin"})
    with keeping(tmp_path, broken) as keeper:
        until(lambda: "engine process 1 has ended" in (tmp_path / "keeper.log").read_text())
        for started in (1, 2):
            lease = EngineLease(keeper.client.name, broken)
            with pytest.raises(EngineCorrupt):
                lease.obtain()
            lease._connection.close()
            told = (tmp_path / "keeper.log").read_text()
            assert ("engine process 2 starts" in told) == (started == 2)


def test_an_engine_whose_stub_died_is_leased_again_without_loading(keeper: Keeper) -> None:
    with subprocess.Popen(["sleep", "600"]) as triton:
        lease = EngineLease(
            keeper.client.name,
            EngineSpec.of(ENGINE, {"max_batch_size": "4"}),
            triton.pid,
        )
        address = lease.obtain()
        assert locate_engine(keeper.client.name, triton.pid) == address
        lease._connection.close()  # as the kernel does for a stub that was killed
        assert triton.wait(PATIENCE_S) == -signal.SIGKILL, "its requests would wait forever"
    with pytest.raises(OSError, match="no engine is leased yet"):
        locate_engine(keeper.client.name, triton.pid)
    again = EngineLease(keeper.client.name, EngineSpec.of(ENGINE, {"max_batch_size": "4"}))
    assert again.obtain() == address
    again.release()
    other = EngineLease(keeper.client.name, EngineSpec.of(ENGINE, {"max_batch_size": "5"}))
    assert other.obtain() != address
    other.release()


def test_two_tritonservers_lease_two_engines(keeper: Keeper) -> None:
    spec = EngineSpec.of(ENGINE, {"max_batch_size": "4"})
    leases = [EngineLease(keeper.client.name, spec) for _ in range(2)]
    assert len({lease.obtain() for lease in leases}) == 2
    for lease in leases:
        lease.release()


def test_a_lease_that_nobody_waits_for_any_more_costs_no_second_engine(keeper: Keeper) -> None:
    spec = EngineSpec.of(ENGINE, {"max_batch_size": "4"})
    gone = EngineLease(keeper.client.name, spec)
    gone._connection.send(gone._request)
    until(lambda: any(keeper.directory.glob("engine-*.log")))
    gone._connection.close()
    lease = EngineLease(keeper.client.name, spec)
    assert lease.obtain().endswith("-1")
    lease.release()


def test_guests_follow_to_the_next_engine(keeper: Keeper) -> None:
    owner = Owner(keeper)
    opened: list[int] = []
    connector = GuestConnector(lambda: locate_engine(keeper.client.name, 0))
    guest = EngineClient([connector], "tokens", on_open=opened.append)
    guest.start()
    until(lambda: opened == [0])
    os.kill(owner.pid, signal.SIGKILL)
    until(lambda: opened == [0, 0])
    events: list[TokenEvent] = []
    request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=2))
    guest.submit(1, request, events.append)
    until(lambda: events and events[-1].finish)
    assert [token for event in events for token in event.token_ids] == [2, 3]
    guest.close()
    owner.engine.close()


def test_the_supervisor_has_a_faulty_engine_killed(keeper: Keeper) -> None:
    owner = Owner(keeper)
    first = owner.pid
    keeper.kill_engine("the engine fails every request")
    assert keeper.death() == "the engine fails every request"
    owner.answer(1)
    assert owner.pid != first
    owner.engine.close()


def test_a_dead_keeper_is_started_anew_while_its_reaper_is_at_work(keeper: Keeper) -> None:
    (pid,) = keeper.pids
    assert keeper.client._process is not None
    reaper = keeper.client._process.process.pid
    os.kill(reaper, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    # Whichever is noticed first.
    assert keeper.death() in (
        "the engine keeper has died",
        f"process {reaper} of the engine keeper was stopped",
    )
    assert not keeper.client.alive
    keeper.start()
    owner = Owner(keeper)
    assert owner.answer(1) == [2, 3, 4]
    owner.engine.close()


def test_of_engines_that_ended_the_last_logs_are_kept(keeper: Keeper) -> None:
    owner = Owner(keeper)
    log = keeper.directory / "keeper.log"
    for number in range(2, 6):
        os.kill(owner.pid, signal.SIGKILL)
        told = f"engine process {number} is leased"
        until(lambda told=told: told in log.read_text())
        assert owner.answer(100) == [101, 102, 103]  # its stub has taken it, too
    names = {path.name for path in keeper.directory.glob("engine-*.log")}
    assert names == {f"engine-{number}.log" for number in (2, 3, 4, 5)}
    owner.engine.close()


def test_an_engine_that_raises_is_replaced(keeper: Keeper) -> None:
    owner = Owner(keeper)
    owner.submit(BROKEN, 3)
    assert isinstance(owner.events.get(timeout=PATIENCE_S).error, TritonUnavailable)
    assert owner.answer(1) == [2, 3, 4]
    assert "ZeroDivisionError: the engine broke" in (keeper.directory / "engine-1.log").read_text()
    owner.engine.close()


def test_an_engine_that_sleeps_amid_a_step_is_replaced(keeper: Keeper) -> None:
    owner = Owner(keeper)
    pid = owner.pid
    owner.submit(HANGING, 1)
    owner.submit(1, 1)
    assert keeper.death() == f"the engine's process ({pid}) hangs: asleep for 2 s amid its work"
    assert isinstance(owner.events.get(timeout=PATIENCE_S).error, TritonUnavailable)
    assert owner.answer(1) == [2, 3, 4]
    owner.engine.close()


@pytest.mark.parametrize("whose", ["engine", "engine's reaper"])
def test_an_engine_that_was_stopped_is_replaced(keeper: Keeper, whose: str) -> None:
    owner = Owner(keeper)
    root = int(Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[1])
    stopped = owner.pid if whose == "engine" else root
    os.kill(stopped, signal.SIGSTOP)
    assert keeper.death() == f"process {stopped} of the engine was stopped"
    assert owner.answer(1) == [2, 3, 4]
    until(lambda: not Path(f"/proc/{root}").exists())
    owner.engine.close()


def test_a_long_step_is_no_hang(keeper: Keeper) -> None:
    """It computes; and an idle engine may sleep as long as it likes."""
    owner = Owner(keeper)
    detector = HangDetector(owner.pid, lambda: 0.0, looks=2)
    idle = HangDetector(owner.pid, lambda: math.inf, looks=2)
    until(detector.hangs)  # it sleeps, and this detector takes a step to be overdue
    owner.submit(SPINNING, 1)
    ticks = watchdog._cpu_time(owner.pid)
    until(lambda: watchdog._cpu_time(owner.pid) > ticks + 5)
    for _ in range(20):
        assert not detector.hangs()
        assert not idle.hangs()
        time.sleep(0.02)
    keeper.kill_engine("it has computed enough")
    assert keeper.death() == "it has computed enough"
    owner.engine.close()


def test_an_engine_that_does_not_load_raises_its_error(keeper: Keeper) -> None:
    with pytest.raises(EngineCorrupt, match=r"x\.bin: torn in two"):
        Owner(keeper, corrupt="x.bin")
    for engine, said in (("step_engines:NoClass", "NoClass"), ("no_module:Engine", "no_module")):
        spec = EngineSpec.of(engine, {})
        with pytest.raises(RuntimeError, match="did not load") as caught:
            leased_engines(keeper.client.name, spec)
        assert said in str(caught.value), "the last lines of its log are told"


def test_an_engine_that_does_not_come_back_stops_tritonserver(
    keeper: Keeper, tmp_path: Path
) -> None:
    with subprocess.Popen(["sleep", "600"]) as triton:
        owner = Owner(keeper, triton.pid)
        pid = owner.pid
        owner.pid_file.unlink()
        owner.pid_file.mkdir()  # so that the next one cannot write it
        os.kill(pid, signal.SIGKILL)
        assert triton.wait(PATIENCE_S) == -signal.SIGTERM
        owner.engine.close()


def test_the_keepers_death_ends_its_engines_and_is_told(keeper: Keeper) -> None:
    owner = Owner(keeper)
    engine = owner.pid
    os.kill(keeper.program, signal.SIGKILL)
    assert keeper.death() == "the engine keeper has died"
    until(lambda: not Path(f"/proc/{engine}").exists())
    owner.engine.close()


def test_a_keeper_that_cannot_start_says_why(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    with pytest.raises(TritonStartFailed, match="the engine keeper does not start"):
        keeper.run(keeper.client.start({"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}))
    keeper.close()


def test_a_triton_without_a_keeper_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEEPER_VARIABLE, raising=False)
    with pytest.raises(TritonUnavailable, match=f"{KEEPER_VARIABLE} is not set"):
        keeper_name()


@pytest.mark.parametrize("whose", ["keeper", "keeper's reaper"])
def test_a_stopped_keeper_ends_as_a_dead_one(keeper: Keeper, whose: str) -> None:
    """With a stopped keeper its engine dies, too, which it cannot tell."""
    owner = Owner(keeper)
    engine, program = owner.pid, keeper.program
    assert keeper.client._process is not None
    stopped = program if whose == "keeper" else keeper.client._process.process.pid
    os.kill(stopped, signal.SIGSTOP)
    if whose == "keeper":
        os.kill(engine, signal.SIGKILL)
    assert keeper.death() == f"process {stopped} of the engine keeper was stopped"
    assert not keeper.client.alive
    with pytest.raises(TritonUnavailable, match="engine keeper was stopped"):
        keeper.run(keeper.client.wait_until_leased())
    keeper.start()
    assert process_state(program) in ("", "Z")
    again = Owner(keeper)
    assert again.answer(1) == [2, 3, 4]
    owner.engine.close()
    again.engine.close()


def test_the_loss_of_a_keeper_during_a_restart_is_not_forgotten(keeper: Keeper) -> None:
    """Its engine died just before, and whoever waited for the next one forgets that death."""
    owner = Owner(keeper)
    os.kill(owner.pid, signal.SIGKILL)
    assert keeper.client._process is not None
    os.kill(keeper.client._process.process.pid, signal.SIGSTOP)
    until(lambda: keeper.client.lost)
    keeper._loop.call_soon_threadsafe(keeper.client.forget_deaths)
    while "keeper was stopped" not in keeper.death():
        pass
    keeper.start()
    owner.engine.close()


def test_a_keeper_that_hangs_ends_as_a_dead_one(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_client, "_PROGRAM", "hanging_keeper")
    keeper.run(keeper.client.stop())
    keeper.start()
    assert keeper.client._process is not None
    (pid,) = keeper.pids
    keeper.client._process.signal(signal.SIGUSR1)
    assert keeper.death() == (
        f"the engine keeper's process ({pid}) hangs: asleep for 2 s amid its work"
    )
    keeper.start()
    owner = Owner(keeper)
    assert owner.answer(1) == [2, 3, 4]
    owner.engine.close()
