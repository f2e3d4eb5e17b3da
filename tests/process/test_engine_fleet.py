"""Engine fleet: real engine processes at fixed addresses, replaced by others or by spares."""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_clients import RawClient
from stack import wait_until as until
from started_engines import StartedEngine
from started_fleet import StartedFleet, says, started
from step_engines import ENGINE, HANGING
from vllm_engines import vllm_engine
from vllm_hosts import ABC, HANDLES, HOST, PATIENCE_S, Inbox, ask, tokens

from cog_triton.engines.engine_spec import SPARE_LOADS, EngineSpec
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import TritonUnavailable
from cog_triton.front.triton_only_server import _require_engines
from cog_triton.processes import engine_child, engine_fleet
from cog_triton.processes.engine_child import EngineChild
from cog_triton.processes.orders import EngineDeath

FOREVER = 10**9
Logged = Callable[[str], None]
pytestmark = pytest.mark.usefixtures("vllm_environment")


@pytest.fixture(autouse=True)
def _spares_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_fleet, "_SPARE_DELAY_S", 0.1)


def counting(**parameters: str) -> EngineSpec:
    return EngineSpec.of(ENGINE, {"max_batch_size": "4", **parameters})


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StartedFleet]:
    with started(tmp_path, counting(leaves="a child")) as fleet:
        yield fleet


def submit(fleet: StartedFleet, first: int) -> Inbox:
    """A request that does not end; it has begun when another has an answer."""
    inbox = Inbox()
    fleet.client.submit(next(HANDLES), tokens([first], FOREVER), inbox)
    return inbox


def test_another_listens_at_the_address_of_one_that_died_once_all_that_it_left_is_gone(
    caplog: pytest.LogCaptureFixture, fleet: StartedFleet
) -> None:
    caplog.set_level("INFO", "cog_triton")
    assert says(fleet.client, [100]) == [101, 102, 103, 104]
    assert fleet.run(fleet.engines.wait_until_serving()) == {0: 1}
    pid, before = fleet.pid(), fleet.pids
    assert len(before) == 2  # with its child
    lost = submit(fleet, 7)
    lost.next()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(lost.until_end()[-1].error, TritonUnavailable)
    assert says(fleet.client, [100]) == [101, 102, 103, 104]
    assert not before & fleet.pids
    assert fleet.engines.serving == 1
    ended = f"1 was killed by SIGKILL (log: {fleet.directory}/engine-1.log)"
    lines = (ended, "2 starts", "2 has loaded", "2 serves")
    places = [caplog.text.index(f"engine process {line}") for line in lines]
    assert places == sorted(places)
    death = fleet.death()
    reason = f"the engine's process ({pid}) has died"
    assert death == EngineDeath(reason, 0, 0, death.lasted)
    assert death.lasted is not None
    client = RawClient(*fleet.addresses)
    assert client.receive().generation == 2
    client.close()


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (ENGINE, r"E1306 EngineCorrupt: x\.bin: torn in two"),
        ("step_engines:NoClass", "its process has ended; its last lines (.|\n)* 'NoClass'"),
    ],
)
def test_an_engine_that_does_not_load_says_why(engine: str, said: str, tmp_path: Path) -> None:
    with started(tmp_path, EngineSpec.of(engine, {"corrupt": "x.bin"})) as fleet:
        reason = fleet.run(fleet.engines.wait_until_failed())
        assert re.match(f"the engine did not load: {said}", reason)
        assert fleet.death() == EngineDeath(reason, 0, 0, lasted=None)


def test_one_that_does_not_come_back_is_a_failure_until_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "pid"
    with started(tmp_path, counting(pid_file=str(blocked))) as fleet:
        pid = fleet.pid()
        blocked.unlink()
        blocked.mkdir()  # so that the next one cannot write it
        os.kill(pid, signal.SIGKILL)
        assert "IsADirectoryError" in fleet.run(fleet.engines.wait_until_failed())
        with pytest.raises(TritonUnavailable, match="the engine did not load: its"):
            fleet.run(_require_engines(fleet.engines, 5))
        assert f"engine 0: the engine's process ({pid}) has died" in caplog.messages
        blocked.rmdir()
        before = fleet.addresses
        fleet.run(fleet.engines.kill())
        assert not fleet.pids
        fleet.client.close()
        fleet.connect()
        assert fleet.addresses != before
        fleet.client.cancel(1)
        with pytest.raises(TritonUnavailable, match="the engine is still loading"):
            submit(fleet, 1)
        fleet.start()
        fleet.start()  # which changes nothing
        assert says(fleet.client, [1]) == [2, 3, 4, 5]
        assert fleet.run(fleet.engines.wait_until_serving()) == {0: 1}
        assert len(fleet.pids) == 1


@pytest.mark.parametrize(
    ("prompt", "number", "said"),
    [
        (HANGING, None, "the engine's process ({0}) hangs: asleep for 2 s amid its work"),
        (1, signal.SIGSTOP, "process {0} of the engine was stopped"),
    ],
    ids=["hangs", "is stopped"],
)
def test_an_engine_is_replaced_that(
    prompt: int, number: int | None, said: str, fleet: StartedFleet
) -> None:
    until(fleet.client.loads)
    pid, before = fleet.pid(), fleet.pids
    lost = submit(fleet, prompt)
    if number is not None:
        os.kill(pid, number)
    assert fleet.death().reason == said.format(pid)
    assert isinstance(lost.until_end()[-1].error, TritonUnavailable)
    assert says(fleet.client, [1]) == [2, 3, 4, 5]
    assert not before & fleet.pids


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    caplog.set_level("DEBUG", "cog_triton")
    return lambda text: until(lambda: text in caplog.text)


def of_vllm(tmp_path: Path, loads: str = "beside") -> EngineSpec:
    directory = vllm_engine(tmp_path / "engine")
    return EngineSpec.of(HOST, {"engine_dir": str(directory), SPARE_LOADS: loads})


def kill_and_replace(fleet: StartedFleet) -> None:
    assert says(fleet.client, ABC) == [*b"abca"]
    os.kill(fleet.pid(), signal.SIGKILL)
    fleet.death()
    assert says(fleet.client, ABC) == [*b"abca"]


def test_a_parked_spare_that_takes_over_or_dies_is_replaced(tmp_path: Path, logged: Logged) -> None:
    with started(tmp_path, of_vllm(tmp_path), spare=True) as fleet:
        logged("spare engine 2 is parked: asleep in ")
        os.kill(fleet.other().process.pid, signal.SIGKILL)
        logged("spare engine 3 is parked: asleep in ")
        kill_and_replace(fleet)
        assert fleet.serving().number == 3
        logged("engine 3 is back in ")
        logged("spare engine 4 is parked: asleep in ")


def test_a_spare_is_parked_first_if_two_engines_have_no_room(
    tmp_path: Path, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path, of_vllm(tmp_path, "first"), spare=True) as fleet:
        assert fleet.serving().number == 2
        parked = caplog.text.index("spare engine 1 is parked: asleep in ")
        assert parked < caplog.text.index("engine process 2 starts")
        kill_and_replace(fleet)
        assert fleet.serving().number == 1
        logged("engine 1 is back in ")
        logged("spare engine 3 is parked: asleep in ")  # beside it, once there is room


def test_a_spare_that_cannot_be_parked_is_ready(
    tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, counting(), spare=True) as fleet:
        logged("spare engine 2 is ready")
        memory = fleet.engines.memory()
        assert min(memory["leased"], memory["spare"]) > 5e6  # each has Python and numpy
        monkeypatch.setattr(engine_fleet, "_SPARE_DELAY_S", 1e6)
        for successor in (2, 3):  # which is not started yet
            os.kill(fleet.pid(), signal.SIGKILL)
            fleet.death()
            assert says(fleet.client, [7]) == [8, 9, 10, 11]
            assert fleet.serving().number == successor


def test_a_spare_that_does_not_wake_up_is_replaced(
    tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_child, "_WAKE_S", 0.0)
    with started(tmp_path, of_vllm(tmp_path), spare=True) as fleet:
        logged("spare engine 2 is parked")
        kill_and_replace(fleet)
        logged("spare engine 2 does not wake up: E2111 ")
        assert fleet.serving().number == 3


@pytest.fixture
def two(tmp_path: Path) -> Iterator[StartedFleet]:
    # Of a Python of its own, whose environment is made of the given one.
    parameters = {"max_batch_size": "4", "pid_file": str(tmp_path / "pid")}
    spec = EngineSpec.of(ENGINE, {**parameters, "engine_python": sys.executable})
    with started(tmp_path, spec, count=2, gpus=("5", "6,7")) as fleet:
        until(lambda: len(fleet.client.loads()) == 2)
        yield fleet


def gpus(fleet: StartedFleet, replica: int) -> str:
    variables = Path(f"/proc/{fleet.pid(replica)}/environ").read_text().split("\0")
    (found,) = (one for one in variables if one.startswith("CUDA_VISIBLE_DEVICES="))
    return found.partition("=")[2]


def test_each_engine_has_its_gpus_and_a_dead_one_is_replaced_there(two: StartedFleet) -> None:
    assert [gpus(two, replica) for replica in range(2)] == ["5", "6,7"]
    assert len(two.pids) == 2
    running = {next(HANDLES): Inbox() for _ in range(2)}
    for handle, inbox in running.items():
        two.client.submit(handle, tokens([1], 10**9), inbox)
    assert two.client.loads() == {0: 1, 1: 1}
    two.call(two.engines.end, "it fails every request", 1)
    death = two.death()
    assert (death.reason, death.replica, death.serving) == ("it fails every request", 1, 1)
    until(lambda: two.client.loads() == {0: 1})
    for handle in running:
        two.client.cancel(handle)
    ends = [inbox.until_end()[-1] for inbox in running.values()]
    assert [end.finish for end in ends if end.error is None] == ["cancelled"]
    assert [type(end.error) for end in ends if end.error is not None] == [TritonUnavailable]
    for _ in range(4):  # none goes to the dead one, nor to its successor too early
        assert ask(two.client, tokens([1], 2))[-1].error is None
    until(lambda: len(two.client.loads()) == 2)
    assert [gpus(two, replica) for replica in range(2)] == ["5", "6,7"]
    assert two.run(two.engines.wait_until_serving()) == {0: 1, 1: 2}


def test_one_that_does_not_come_back_is_tried_again_while_the_other_serves(
    two: StartedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "pid"
    blocked.unlink()
    blocked.mkdir()  # so that the next one cannot write it
    os.kill(two.pid(0), signal.SIGKILL)
    assert two.death().serving == 1
    until(lambda: caplog.text.count("engine 0 is not back, and is tried again: ") > 1)
    assert "IsADirectoryError" in caplog.text
    assert ask(two.client, tokens([1], 1))[-1].error is None
    blocked.rmdir()
    until(lambda: two.engines.serving == 2)
    assert not two.engines.has_died
    assert two.engines._failure.empty()


def test_one_that_does_not_load_at_first_is_a_failure_whoever_else_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pid")  # which nobody reads
    parameters = {"max_batch_size": "4", "pid_file": str(tmp_path / "pid")}
    fast, slow = EngineSpec.of(ENGINE, {"max_batch_size": "4"}), EngineSpec.of(ENGINE, parameters)

    def child(number: int, spec: EngineSpec, *args: Any) -> EngineChild:
        return EngineChild(number, slow if args[-1] == "1" else spec, *args)

    monkeypatch.setattr(engine_fleet, "EngineChild", child)
    with started(tmp_path, fast, count=2, gpus=("0", "1")) as fleet:
        fleet.serving(0)
        os.kill(fleet.other().process.pid, signal.SIGKILL)
        assert fleet.run(fleet.engines.wait_until_failed()).startswith("the engine did not load: ")
        death = fleet.death()
        assert (death.replica, death.serving, death.lasted) == (1, 1, None)


def test_sigkill_of_an_engine_ends_every_request_with_e2105_on_another_thread() -> None:
    """`EngineClient.submit` promises so; Triton's model holds a lock that its `emit` takes."""
    ends = queue.Queue[tuple[Any, int]]()

    def emit(event: TokenEvent) -> None:
        if event.error is not None:
            ends.put((event.error, threading.get_ident()))

    engine = StartedEngine(ENGINE, {"max_batch_size": "4"})
    try:
        inbox = Inbox()
        engine.submit(next(HANDLES), tokens([1], FOREVER), inbox)
        for _ in range(8):
            engine.submit(next(HANDLES), tokens([1], FOREVER), emit)
        inbox.next()
        engine._process.kill()
        for number in range(16):  # half of them come to the dead one
            error, thread = ends.get(timeout=PATIENCE_S)
            assert isinstance(error, TritonUnavailable)
            assert thread != threading.get_ident()
            if number < 8:
                engine.submit(next(HANDLES), tokens([1], FOREVER), emit)
        inbox.until_end()
        assert engine.stats().active == 0
        assert ends.empty()
    finally:
        engine.close()
