"""Triton supervisor: restarts, gives up, and fails requests, with real processes and sockets."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from loop_thread import call
from step_engines import ENGINE
from supervised_triton import PATIENCE_S, Make, Supervised, make, supervised, until

from cog_triton import errors
from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import TritonStartFailed, TritonUnavailable
from cog_triton.processes.orders import StartEngines
from cog_triton.serving import supervisor
from cog_triton.serving.admission import Admission
from cog_triton.serving.supervisor import SupervisorState

__all__ = ["make", "supervised"]


def test_start_serve_and_stop(supervised: Supervised) -> None:
    assert supervised.supervisor.state is SupervisorState.STARTING
    supervised.start()
    assert supervised.supervisor.state is SupervisorState.READY
    assert supervised.supervisor.error is None
    assert supervised.stream(3).end() is None
    supervised.stop()
    assert supervised.supervisor.state is SupervisorState.STOPPED
    assert not supervised.triton.server.root_pid
    assert not supervised.failed.is_set()
    supervised.supervisor.check_engine()  # the last words of a request may come late


def test_failed_start_is_raised_without_retry(supervised: Supervised) -> None:
    supervised.triton.fail("dies")
    with pytest.raises(TritonStartFailed, match="exited with code 3"):
        supervised.start()
    assert len(supervised.triton.starts) == 1
    assert not supervised.failed.is_set()


def test_crash_fails_all_requests_and_restart_serves_new_ones(supervised: Supervised) -> None:
    supervised.start()
    inside = [supervised.stream(), supervised.stream()]
    assert all(stream.flowing.wait(PATIENCE_S) for stream in inside)
    waiting = [supervised.stream(), supervised.stream()]
    until(lambda: supervised.admission.waiting == 2)
    os.kill(supervised.triton.starts[0], signal.SIGKILL)
    ends = [stream.end() for stream in (*inside, *waiting)]
    assert all(isinstance(error, TritonUnavailable) for error in ends)
    assert all("try again" in str(error) for error in ends)
    until(lambda: supervised.supervisor.restarts == 1)
    supervised.until(SupervisorState.READY)
    assert supervised.stream(3).end() is None
    assert len(supervised.triton.starts) == 2
    assert supervised.supervisor.error is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_with_resume_a_crash_costs_no_request(make: Make, number: int) -> None:
    item = make(resumes=True)
    item.start()
    streams = [item.stream(90) for _ in range(4)]
    assert all(stream.flowing.wait(PATIENCE_S) for stream in streams[:2])
    os.kill(item.triton.starts[0], number)
    assert [stream.end() for stream in streams] == [None] * 4
    assert len({stream.text for stream in streams}) == 1
    assert len(streams[0].text) >= 90
    assert item.supervisor.restarts == 1


def test_engine_and_triton_outlive_each_other_and_streams_both(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    item = make(resumes=True)
    engines, spec = item.triton.server.engines, EngineSpec.of(ENGINE, {"max_batch_size": "1"})
    engines.choose(StartEngines(spec, str(tmp_path), "", {}))
    item.start()
    for restarts, starts in ((1, 1), (2, 2)):
        until(lambda: item.supervisor.state is SupervisorState.READY and bool(engines._state.pids))
        stream, (engine,) = item.stream(90), engines._state.pids
        assert stream.flowing.wait(PATIENCE_S)
        os.kill(engine if starts == 1 else item.triton.starts[0], signal.SIGKILL)
        assert stream.end() is None
        assert (item.supervisor.restarts, len(item.triton.starts)) == (restarts, starts)
        assert ([*engines._state.pids] == [engine]) is (starts == 2)


def test_those_that_wait_end_after_resume_timeout(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STABLE_S", 0)
    resuming = make(resumes=True, resume_timeout=0.5)
    resuming.start()
    stream = resuming.flowing()
    resuming.triton.fail("unready")
    error = stream.end()
    assert isinstance(error, TritonUnavailable)
    assert "waited no longer than 0.5 s (RESUME_TIMEOUT)" in str(error)
    resuming.triton.recover()
    resuming.until(SupervisorState.READY)
    assert resuming.stream(3).end() is None


def test_stopping_ends_those_that_wait(make: Make) -> None:
    item = make(resumes=True)
    item.start()
    stream = item.flowing()
    item.stop()
    assert "the server is stopping" in str(stream.end())


def test_requests_are_admitted_before_readiness_is_told(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[errors.CogTritonError | None] = []
    admit = supervised.admission.open

    def watched_open() -> None:
        told.append(supervised.supervisor.error)
        admit()

    monkeypatch.setattr(supervised.admission, "open", watched_open)
    supervised.start()
    told.clear()
    os.kill(supervised.triton.starts[0], signal.SIGKILL)
    until(lambda: bool(told))
    assert isinstance(told[0], TritonUnavailable)


def test_requests_during_a_restart_get_reason_and_delay(supervised: Supervised) -> None:
    supervised.start()
    supervised.triton.fail("unready")
    supervised.until(SupervisorState.RESTARTING)
    error = supervised.stream(1).end()
    assert isinstance(error, TritonUnavailable)
    assert re.search(r"not ready; Triton is being restarted, try again in \d+ s$", str(error))
    assert isinstance(supervised.supervisor.error, TritonUnavailable)
    supervised.triton.recover()
    supervised.until(SupervisorState.READY)


@pytest.mark.parametrize("planned", [False, True], ids=["after a death", "as planned"])
def test_a_start_that_lacks_something_is_tried_again(
    planned: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = make(resumes=True)
    due = threading.Event()
    lacking = [errors.DiskFull("no space"), OSError(24, "no descriptor")]
    start = item.triton.server.start

    async def start_lacking(*given: Any) -> None:
        if item.triton.starts and lacking:
            raise lacking.pop()
        await start(*given)

    async def restart_due(_: int) -> str:
        while not due.is_set():
            await asyncio.sleep(0.005)
        due.clear()
        return "as the test wants"

    monkeypatch.setattr(item.triton.server, "start", start_lacking)
    monkeypatch.setattr(item.supervisor._memory_limit, "restart_due", restart_due)
    item.start()
    streams = [] if planned else [item.stream(90)]
    if planned:
        due.set()
    else:
        assert streams[0].flowing.wait(PATIENCE_S)
        os.kill(item.triton.starts[0], signal.SIGKILL)
    until(lambda: len(item.triton.starts) == 2)
    item.until(SupervisorState.READY)
    assert [stream.end() for stream in (*streams, item.stream(3))] == [None] * (len(streams) + 1)


def test_gives_up_after_max_restarts(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    item = make(triton_max_restarts=2)
    item.start()
    item.triton.fail("dies")
    os.kill(item.triton.starts[0], signal.SIGKILL)
    assert item.failed.wait(PATIENCE_S)
    assert item.supervisor.state is SupervisorState.FAILED
    assert len(item.triton.starts) == 3
    said = str(item.supervisor.error)
    for words in ("E2106", "given up after 2 restarts", "TRITON_MAX_RESTARTS", "code 3"):
        assert words in said
    error = item.stream(1).end()
    assert isinstance(error, TritonUnavailable)
    assert str(error).endswith("; the server stops")
    assert "a line of the log" not in str(error)
    assert caplog.messages[-1].startswith("The server stops: given up after 2 restarts")


def test_a_log_that_cannot_be_opened_is_a_start_that_failed(make: Make, tmp_path: Path) -> None:
    item = make(triton_max_restarts=1)
    item.start()
    item.triton.server.log = tmp_path / "no directory" / "triton.log"
    os.kill(item.triton.starts[0], signal.SIGKILL)
    assert item.failed.wait(PATIENCE_S)
    assert "given up after 1 restarts" in str(item.supervisor.error)
    assert not [*Path("/dev/shm").glob(f"cog_triton_{tmp_path.name}_*")]


@pytest.mark.parametrize(
    ("stable_s", "suspects", "deaths", "gives_up"),
    [(3600, 0, 3, True), (3600, 1, 3, False), (0, 0, 4, False)],
    ids=["short readiness", "single suspect", "stable readiness"],
)
def test_which_deaths_count_as_restarts_in_a_row(
    stable_s: float,
    suspects: int,
    deaths: int,
    gives_up: bool,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "STABLE_S", stable_s)
    item = make(resumes=bool(suspects), triton_max_restarts=1 if suspects else 2)
    item.start()
    for count in range(1, deaths + 1):
        until(lambda count=count: len(item.triton.starts) == count)
        item.until(SupervisorState.READY)
        monkeypatch.setattr(Admission, "suspects", suspects)
        os.kill(item.triton.starts[-1], signal.SIGKILL)
        until(lambda: item.supervisor.state is not SupervisorState.READY)
    if gives_up:
        assert item.failed.wait(PATIENCE_S)
    else:
        item.until(SupervisorState.READY)
        assert not item.failed.is_set()


def test_one_that_is_let_go_is_not_restarted(supervised: Supervised) -> None:
    supervised.start()
    call(supervised.supervisor.let_go)
    os.kill(supervised.triton.starts[0], signal.SIGKILL)
    until(lambda: not supervised.triton.server.root_pid)
    assert "Triton" in str(supervised.stream(1).end())
    assert len(supervised.triton.starts) == 1
    assert not supervised.failed.is_set()
