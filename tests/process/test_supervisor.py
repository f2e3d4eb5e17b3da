"""Triton supervisor: restarts, failures that it detects, the memory limit; real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from loop_thread import call
from supervised_triton import PATIENCE_S, Make, Supervised, until

from cog_triton import errors
from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.serving import failure_detection, supervisor
from cog_triton.serving.admission import Admission
from cog_triton.serving.supervisor import SupervisorState
from cog_triton.triton import server as triton_server


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


def test_with_resume_a_crash_costs_no_request(make: Make) -> None:
    item = make(resumes=True)
    item.start()
    streams = [item.stream(90) for _ in range(4)]
    assert all(stream.flowing.wait(PATIENCE_S) for stream in streams[:2])
    os.kill(item.triton.starts[0], signal.SIGKILL)
    assert [stream.end() for stream in streams] == [None] * 4
    assert len({stream.text for stream in streams}) == 1
    assert len(streams[0].text) >= 90
    assert item.supervisor.restarts == 1


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


def test_a_start_that_lacks_something_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = make(resumes=True)
    lacking = [errors.DiskFull("no space"), OSError(24, "no descriptor")]
    start = item.triton.server.start

    async def start_lacking(*given: Any) -> None:
        if item.triton.starts and lacking:
            raise lacking.pop()
        await start(*given)

    monkeypatch.setattr(item.triton.server, "start", start_lacking)
    item.start()
    stream = item.stream(90)
    assert stream.flowing.wait(PATIENCE_S)
    os.kill(item.triton.starts[0], signal.SIGKILL)
    until(lambda: len(item.triton.starts) == 2)
    item.until(SupervisorState.READY)
    assert [stream.end(), item.stream(3).end()] == [None, None]


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


@pytest.mark.parametrize(
    ("stable_s", "suspects", "deaths"),
    [(3600, 1, 3), (0, 0, 4)],
    ids=["single suspect", "stable readiness"],
)
def test_deaths_by_a_single_suspect_or_after_a_stable_readiness_do_not_count(
    stable_s: float, suspects: int, deaths: int, make: Make, monkeypatch: pytest.MonkeyPatch
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


def test_hanging_server_is_restarted(
    supervised: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cog_triton")
    supervised.start()
    stream = supervised.flowing()
    supervised.limit_probes(0.5)
    supervised.triton.fail("hangs")
    error = stream.end()
    supervised.supervisor._detection._timeout = PATIENCE_S
    supervised.triton.recover()
    assert "did not answer for 0.5 s" in str(error)
    supervised.until(SupervisorState.READY)
    assert len(supervised.triton.starts) == 2
    until(lambda: len(caplog.records) == 2)
    died, ready = caplog.records
    assert died.levelname == "ERROR"
    assert "did not answer for 0.5 s" in died.getMessage()
    assert died.getMessage().endswith("a line of the log")
    assert ready.getMessage().startswith("Triton is ready again after")


def test_engine_that_fails_every_request_is_restarted(supervised: Supervised) -> None:
    supervised.start()
    supervised.triton.fail("broken")
    assert "CUDA error" in str(supervised.stream(3).end())
    supervised.until(SupervisorState.RESTARTING)
    assert "the engine fails every request" in str(supervised.supervisor.error)
    supervised.triton.recover()
    supervised.until(SupervisorState.READY)


def test_one_failed_check_does_not_restart(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised.start()
    checks: list[str] = []
    probe = supervised.generator.probe

    async def fail_first(**_: object) -> None:
        checks.append("check")
        if len(checks) == 1:
            raise TritonUnavailable("the step stream has ended; try again")
        await probe()

    monkeypatch.setattr(supervised.supervisor._detection, "probe", fail_first)
    monkeypatch.setattr(failure_detection, "_PAUSE_S", 0)
    call(supervised.supervisor.check_engine)
    until(lambda: len(checks) == 2 or supervised.supervisor.restarts > 0)
    call(supervised.supervisor.check_engine)
    until(lambda: len(checks) == 3 or supervised.supervisor.restarts > 0)
    assert supervised.supervisor.restarts == 0


@pytest.mark.parametrize(("others", "blamed"), [("0", True), ("1", False), ("", False)])
def test_a_death_is_blamed_on_our_requests_unless_others_ran(
    others: str, blamed: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = make(resumes=True)
    noted: list[int | None] = []
    paused: list[bool] = []
    note, pause = item.transport.note_active, item.admission.pause

    def note_active(requests: int | None) -> None:
        note(requests)
        noted.append(requests)

    def paused_with(refusal: CogTritonError, *, blame: bool) -> None:
        paused.append(blame)
        pause(refusal, blame=blame)

    monkeypatch.setattr(item.transport, "note_active", note_active)
    monkeypatch.setattr(item.admission, "pause", paused_with)
    item.start()
    stream = item.flowing()
    until(lambda: 1 in noted)
    item.triton.use(others)
    until(lambda: noted[-1] == (1 + int(others) if others else None))
    os.kill(item.triton.starts[0], signal.SIGKILL)
    until(lambda: bool(paused))
    assert paused == [blamed]
    stream.leave()


LIMIT = 100


class Memory:
    """Memory of processes: what they hold, and twice the limit on top in one that has grown."""

    def __init__(self) -> None:
        self._held = triton_server.anonymous_bytes
        self._grown = 0
        self._seen: set[int] = set()

    def anonymous_bytes(self, pid: int) -> int:
        held = self._held(pid) + (2 * LIMIT << 20) * (pid == self._grown)
        self._seen.add(pid)
        return held

    def grow(self, pid: int) -> None:
        """Let a process grow, after its memory at the start was looked at."""
        until(lambda: pid in self._seen)
        self._grown = pid


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    monkeypatch.setattr(failure_detection, "_PERIOD_S", 0.01)
    monkeypatch.setattr(triton_server, "anonymous_bytes", found.anonymous_bytes)
    return found


@pytest.fixture
def limited(make: Make) -> Make:
    """Makes and starts one with a memory limit."""

    def one(*, resumes: bool) -> Supervised:
        item = make(resumes=resumes, triton_memory_limit=LIMIT)
        item.start()
        return item

    return one


def restarted(item: Supervised) -> Callable[[], bool]:
    return lambda: (
        item.supervisor.planned_restarts == 1 and item.supervisor.state is SupervisorState.READY
    )


def test_streams_that_never_pause_continue_after_a_restart_for_memory(
    limited: Make, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(failure_detection, "_QUIET_WAIT_S", 0)
    item = limited(resumes=True)
    streams = [item.stream(200) for _ in range(4)]
    assert all(stream.flowing.wait(PATIENCE_S) for stream in streams[:2])
    memory.grow(item.triton.starts[0])
    until(lambda: len(item.triton.starts) == 2)
    assert item.supervisor.error is None, "it is no failure"
    assert [stream.end() for stream in streams] == [None] * 4
    assert len({stream.text for stream in streams}) == 1
    until(restarted(item))
    assert item.supervisor.restarts == 0


def test_a_restart_for_memory_waits_until_nothing_runs(
    limited: Make, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    item = limited(resumes=False)
    stream = item.flowing()
    memory.grow(item.triton.starts[0])
    until(lambda: "it is restarted when nothing runs" in caplog.text)
    assert len(item.triton.starts) == 1
    assert stream.is_alive()
    stream.leave()
    until(restarted(item))
    assert item.stream(3).end() is None


def test_a_memory_limit_exceeded_from_the_start_is_ignored(
    limited: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_server, "anonymous_bytes", lambda pid: 2 * LIMIT << 20)
    monkeypatch.setattr(failure_detection, "_PERIOD_S", 0.01)
    item = limited(resumes=True)
    until(lambda: "holds 200 MiB, more than 100 (TRITON_MEMORY_LIMIT)" in caplog.text)
    assert "ignored" in caplog.text
    time.sleep(0.1)
    assert len(item.triton.starts) == 1
