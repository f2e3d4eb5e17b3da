"""Liveness of Cog's processes, by stand-ins with the same command lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cog_triton.serving.cog_liveness import CogProcesses

SLEEP = "import time; time.sleep(60)"
COMMANDS = {
    "front door": [sys.executable, "-c", SLEEP, "cog_triton.door"],
    "parent": [sys.executable, "-c", SLEEP, "cog_triton.serving.coglet.http_server"],
    "worker": [sys.executable, "-c", f"{SLEEP}; coglet.server._run_worker()"],
}


@pytest.fixture
def started() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    processes = {role: subprocess.Popen(command) for role, command in COMMANDS.items()}
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


def look() -> str | None:
    deadline = time.monotonic() + 5
    found = None
    while found is None and time.monotonic() < deadline:
        found = CogProcesses(os.getpid()).stopped()
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("role", list(COMMANDS))
def test_a_stopped_process_is_named(started: dict[str, subprocess.Popen[bytes]], role: str) -> None:
    time.sleep(0.05)
    assert CogProcesses(os.getpid()).stopped() is None
    started[role].send_signal(signal.SIGSTOP)
    assert look() == f"Cog's {role} (process {started[role].pid}) was stopped"


@pytest.mark.parametrize("role", ["worker", "parent"])
def test_only_one_role_is_killed(started: dict[str, subprocess.Popen[bytes]], role: str) -> None:
    time.sleep(0.05)
    assert CogProcesses(os.getpid()).kill(role)
    assert started.pop(role).wait(5) == -signal.SIGKILL
    assert all(process.poll() is None for process in started.values())
    assert not CogProcesses(os.getpid()).kill(role)


def test_a_stopped_child_of_the_front_door_is_no_reason_to_end() -> None:
    command = [sys.executable, "-c", SLEEP, "-m", "cog_triton.door.large_bodies_child", "3"]
    process = subprocess.Popen(command)
    time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        assert CogProcesses(os.getpid()).stopped() is None
    finally:
        process.kill()
        process.wait()
