"""Memory limit of Triton: a planned restart, with real processes, that costs no request."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from supervised_triton import PATIENCE_S, Make, Supervised, make, until

from cog_triton.serving import failure_detection
from cog_triton.serving.supervisor import SupervisorState
from cog_triton.triton import server as triton_server

LIMIT = 100
__all__ = ["make"]


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


def test_streams_that_never_pause_go_on_after_it(
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


@pytest.mark.parametrize("resumes", [True, False])
def test_it_waits_until_nothing_runs(limited: Make, memory: Memory, resumes: bool) -> None:
    item = limited(resumes=resumes)
    stream = item.flowing()
    memory.grow(item.triton.starts[0])
    time.sleep(0.5)
    assert len(item.triton.starts) == 1
    assert stream.is_alive()
    stream.leave()
    until(restarted(item))
    assert item.stream(3).end() is None


def test_requests_during_it_are_queued(limited: Make, memory: Memory) -> None:
    item = limited(resumes=False)
    memory.grow(item.triton.starts[0])
    until(lambda: item.supervisor.state is SupervisorState.RESTARTING)
    assert item.stream(3).end() is None
    assert restarted(item)()


def test_limit_exceeded_from_the_start_is_ignored(
    limited: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_server, "anonymous_bytes", lambda pid: 2 * LIMIT << 20)
    monkeypatch.setattr(failure_detection, "_PERIOD_S", 0.01)
    item = limited(resumes=True)
    until(lambda: "holds 200 MiB, more than 100 (TRITON_MEMORY_LIMIT)" in caplog.text)
    assert "ignored" in caplog.text
    time.sleep(0.1)
    assert len(item.triton.starts) == 1
