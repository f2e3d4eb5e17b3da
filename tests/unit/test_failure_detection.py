"""Failure detection of a running Triton: what hangs or fails every request is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from loop_thread import call
from supervised_triton import PATIENCE_S, Make, Supervised, make, supervised, until

from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.serving import failure_detection
from cog_triton.serving.supervisor import SupervisorState

__all__ = ["make", "supervised"]


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


def test_slow_probe_is_ignored_while_bytes_arrive(supervised: Supervised) -> None:
    supervised.start()
    heard = threading.Event()

    def hear() -> None:
        while not heard.wait(0.01):
            supervised.transport.last_token_at = time.monotonic()

    hearing = threading.Thread(target=hear)
    hearing.start()
    supervised.limit_probes(0.5)
    supervised.triton.fail("hangs")
    time.sleep(1.5)
    supervised.triton.recover()
    heard.set()
    hearing.join()
    assert supervised.supervisor.restarts == 0


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


def test_others_matter_for_some_seconds(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised.start()
    monkeypatch.setattr(failure_detection, "_OTHERS_S", 600)
    for ago, blamed in ((500, False), (700, True)):
        supervised.transport.others_at = time.monotonic() - ago
        detection = supervised.supervisor._detection
        assert asyncio.run(detection.blames(of_engine=False)) is blamed
