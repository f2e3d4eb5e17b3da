"""Engine fleet: real engine processes at fixed addresses, replaced when they die."""

from __future__ import annotations

import asyncio
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from process_trees import running
from raw_clients import RawClient
from started_fleet import StartedFleet, says, started, until
from step_engines import BROKEN, ENGINE, HANGING, SPINNING
from vllm_hosts import HANDLES, Inbox, tokens

from cog_triton.engines import engine_spec
from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import TritonUnavailable
from cog_triton.front.triton_only_server import _require_engines
from cog_triton.processes import engine_fleet, watchdog
from cog_triton.processes.engine_fleet import EngineDeath
from cog_triton.processes.watchdog import HangDetector
from cog_triton.serving.supervisor import Supervisor
from cog_triton.system import local_socket

FOREVER = 10**9


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cog_triton")


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
    fleet: StartedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    assert says(fleet.client, [100]) == [101, 102, 103, 104]
    assert fleet.run(fleet.fleet.wait_until_serving()) == {0: 1}
    pid, before = fleet.pid(), fleet.pids
    assert len(before) == 3  # its reaper, and its child
    lost = submit(fleet, 7)
    lost.next()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(lost.until_end()[-1].error, TritonUnavailable)
    assert says(fleet.client, [100]) == [101, 102, 103, 104]
    assert not before & fleet.pids
    assert fleet.fleet.serving == 1
    ended = f"1 has died (log: {fleet.directory}/engine-1.log)"
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


def test_deaths_before_an_engine_serves_are_forgotten_and_a_stop_is_in_time(tmp_path: Path) -> None:
    with started(tmp_path, counting()) as fleet:
        os.kill(fleet.pid(), signal.SIGKILL)
        until(lambda: fleet.fleet.serving == 0)
        assert fleet.run(fleet.fleet.wait_until_serving()) == {0: 2}
        fleet.call(fleet.fleet.end, "it fails every request", 1)
        fleet.call(fleet.fleet.end, "it fails every request")
        assert fleet.death().reason == "it fails every request"
        process = fleet.serving()._process.process
        assert says(fleet.client, [1]) == [2, 3, 4, 5]
        fleet.run(fleet.fleet.stop())
        assert process.returncode == 0
        assert not fleet.pids


def test_a_death_during_the_check_of_a_start_is_no_failure_after_it(fleet: StartedFleet) -> None:
    checked = []

    def check(generations: Mapping[int, int]) -> None:
        checked.append(generations)
        if len(checked) == 1:
            os.kill(fleet.pid(), signal.SIGKILL)
            until(lambda: fleet.serving().number == 2)

    server = SimpleNamespace(engines=fleet.fleet)
    start = cast(Any, SimpleNamespace(_server=server, _open_and_probe=check))
    fleet.run(Supervisor._verify(start))
    assert checked == [{0: 1}, {0: 2}]
    assert not fleet.fleet.has_died


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (ENGINE, r"E1306 EngineCorrupt: x\.bin: torn in two"),
        ("step_engines:NoClass", "its process has ended; its last lines (.|\n)* 'NoClass'"),
        ("no_module:Engine", "its process has ended; its last lines (.|\n)* 'no_module'"),
    ],
)
def test_an_engine_that_does_not_load_says_why(engine: str, said: str, tmp_path: Path) -> None:
    with started(tmp_path, EngineSpec.of(engine, {"corrupt": "x.bin"})) as fleet:
        reason = fleet.run(fleet.fleet.wait_until_failed())
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
        assert "IsADirectoryError" in fleet.run(fleet.fleet.wait_until_failed())
        with pytest.raises(TritonUnavailable, match="the engine did not load: its"):
            fleet.run(_require_engines(fleet.fleet, 5))
        assert f"engine 0: the engine's process ({pid}) has died" in caplog.messages
        blocked.rmdir()
        for generation in (2, 3):
            before = fleet.addresses
            fleet.call(fleet.fleet.kill)
            assert not fleet.pids
            fleet.client.close()
            fleet.connect()
            assert fleet.addresses != before
            fleet.start()
            fleet.start()  # which changes nothing
            assert says(fleet.client, [1]) == [2, 3, 4, 5]
            assert fleet.run(fleet.fleet.wait_until_serving()) == {0: generation}
            assert len(fleet.pids) == 2


def test_one_that_dies_again_and_again_is_started_with_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def paused(seconds: float) -> None:
        if seconds == watchdog._PERIOD_S:
            await sleep(seconds)
        else:
            pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", paused)
    monkeypatch.setattr(engine_fleet, "_LAST_PAUSE_S", 1.5)
    with started(tmp_path, counting()) as fleet:
        for number in range(1, 7):
            until(lambda n=number: fleet.serving().number == n)
            if number == 6:
                monkeypatch.setattr(engine_fleet, "_STABLE_S", 0.0)
            fleet.call(fleet.fleet.end, "again")
        assert says(fleet.client, [1]) == [2, 3, 4, 5]
        assert len(fleet.fleet._living) == 1
        assert pauses == [0.0, 0.5, 1.0, 1.5, 1.5, 0.0]
        names = {path.name for path in tmp_path.glob("engine-*.log")}
        assert names == {f"engine-{number}.log" for number in (4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("prompt", "stopped", "said"),
    [
        (BROKEN, None, "the engine's process ({0}) has died"),
        (HANGING, None, "the engine's process ({0}) hangs: asleep for 2 s amid its work"),
        (1, 0, "process {0} of the engine was stopped"),
        (1, 1, "process {1} of the engine was stopped"),
    ],
    ids=["raises", "hangs", "is stopped", "whose reaper is stopped"],
)
def test_an_engine_is_replaced_that(
    prompt: int, stopped: int | None, said: str, fleet: StartedFleet
) -> None:
    until(fleet.client.loads)
    pids, before = (fleet.pid(), fleet.serving().root_pid), fleet.pids
    lost = submit(fleet, prompt)
    if stopped is not None:
        os.kill(pids[stopped], signal.SIGSTOP)
    assert fleet.death().reason == said.format(*pids)
    assert isinstance(lost.until_end()[-1].error, TritonUnavailable)
    assert says(fleet.client, [1]) == [2, 3, 4, 5]
    assert not before & fleet.pids


def test_a_long_step_is_no_hang(fleet: StartedFleet) -> None:
    """It computes; and an idle engine may sleep as long as it likes."""
    pid = fleet.pid()
    until(fleet.client.loads)
    detector = HangDetector(pid, lambda: 0.0, looks=2)
    idle = HangDetector(pid, lambda: math.inf, looks=2)
    until(detector.hangs)  # it sleeps, and this detector takes a step to be overdue
    submit(fleet, SPINNING)
    ticks = watchdog._cpu_time(pid)
    until(lambda: watchdog._cpu_time(pid) > ticks + 5)
    for _ in range(20):
        assert not detector.hangs()
        assert not idle.hangs()
        time.sleep(0.02)
    fleet.call(fleet.fleet.end, "it has computed enough")
    assert fleet.death().reason == "it has computed enough"


def test_an_engine_that_was_stopped_while_it_loads_has_failed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")  # which nobody reads
    with started(tmp_path, counting(pid_file=str(tmp_path / "pid"))) as fleet:
        (engine,) = fleet.call(tuple, fleet.fleet._living)
        os.kill(engine.root_pid, signal.SIGSTOP)
        failed = fleet.run(fleet.fleet.wait_until_failed())
        assert f"load: process {engine.root_pid} of the engine was stopped; its last" in failed
        for _ in range(2):
            fleet.call(fleet.fleet.kill)
            assert not fleet.pids
            fleet.start()
            until(lambda: len(fleet.pids) == 2)  # what still loads is killed, or stopped at the end


def test_an_engine_whose_address_another_process_has_is_tried_again(tmp_path: Path) -> None:
    fleet = StartedFleet(tmp_path, counting())
    taken = local_socket.listen(*fleet.addresses)
    try:
        fleet.start()
        assert [fleet.death().serving for _ in range(2)] == [0, 0]
        taken.close()
        assert says(fleet.client, [1]) == [2, 3, 4, 5]
        assert "Address already in use" in (tmp_path / "engine-1.log").read_text()
    finally:
        taken.close()
        fleet.close()


def open_descriptors() -> set[int]:
    return {int(fd.name) for fd in list(Path("/proc/self/fd").iterdir()) if fd.is_symlink()}


def test_a_start_that_lacks_descriptors_has_failed_and_leaves_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = StartedFleet(tmp_path, counting())
    fleet.client.close()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    free = [number for number in range(1000) if number not in before]
    try:
        for spared in free[:10]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (spared, limits[1]))
            fleet.start()
            failed = fleet.run(fleet.fleet.wait_until_failed())
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert "Too many open files" in failed
            fleet.call(fleet.fleet.kill)
            assert open_descriptors() == before
        fleet.start()
        engine = fleet.serving()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        fleet.call(engine.end, "it cannot be cleaned up yet")
        until(lambda: "is still there: [Errno 24]" in caplog.text)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert fleet.run(fleet.fleet.wait_until_serving()) == {0: 2}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        fleet.close()


def test_the_death_of_its_process_ends_its_engines(tmp_path: Path) -> None:
    program = (
        "import sys, test_engine_fleet as tests; from pathlib import Path\n"
        "fleet = tests.StartedFleet(Path(sys.argv[1]), tests.counting()); fleet.start()\n"
        "fleet.serving(); print(*fleet.pids, flush=True); tests.signal.pause()"
    )
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = [*map(int, owner.stdout.readline().split())]
        owner.kill()
    assert len(pids) == 2
    until(lambda: not any(map(running, pids)))


def test_a_triton_that_no_server_has_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_spec.ADDRESS_VARIABLE, raising=False)
    with pytest.raises(TritonUnavailable, match=f"{engine_spec.ADDRESS_VARIABLE} is not set"):
        engine_spec.own_addresses()
