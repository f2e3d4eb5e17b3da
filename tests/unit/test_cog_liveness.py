"""Liveness of Cog's processes, by stand-ins with the same command lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from scripted_server import wait_until

from cog_triton.serving.cog_health import CogProcesses
from cog_triton.system import reaper
from cog_triton.system.process_state import process_state

SLEEP = "import time; time.sleep(60)"
COMMANDS = {
    "front door": [sys.executable, "-c", SLEEP, "cog_triton.door"],
    "server": [sys.executable, "-c", SLEEP, "cog_triton.serving.server"],
    "parent": [sys.executable, "-c", SLEEP, "cog.server.http"],
    "worker": [sys.executable, "-c", f"{SLEEP}; coglet.server._run_worker()"],
}


# Their parent, so that servers which other tests keep are not among its descendants.
START = """
import json, subprocess, sys
commands = json.loads(sys.argv[1])
started = {role: subprocess.Popen(command) for role, command in commands.items()}
print(json.dumps({role: process.pid for role, process in started.items()}), flush=True)
sys.stdin.read()
"""


class StandIns:
    """Stand-ins of Cog's processes, and the process that started them."""

    def __init__(self) -> None:
        self.starter = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(COMMANDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.starter.stdout is not None
        self.pids: dict[str, int] = json.loads(self.starter.stdout.readline())
        self.processes = CogProcesses(self.starter.pid)


@pytest.fixture
def cog() -> Iterator[StandIns]:
    started = StandIns()
    yield started
    for pid in started.pids.values():  # none is reaped before its parent ends
        os.kill(pid, signal.SIGKILL)
    started.starter.communicate()


@pytest.mark.parametrize("role", list(COMMANDS))
def test_a_stopped_process_is_named(cog: StandIns, role: str) -> None:
    assert cog.processes.stopped() is None
    os.kill(cog.pids[role], signal.SIGSTOP)
    wait_until(lambda: cog.processes.stopped() is not None)
    assert cog.processes.stopped() == f"Cog's {role} (process {cog.pids[role]}) was stopped"


@pytest.mark.parametrize("role", ["front door", "server"])
def test_a_stopped_reaper_is_named(role: str) -> None:
    process = reaper.spawn(COMMANDS[role])
    try:
        processes = CogProcesses(process.process.pid)
        wait_until(lambda: len(processes._roles()) == 2)
        assert processes.stopped() is None
        process.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: processes.stopped() is not None)
        told = f"Cog's {role}'s reaper (process {process.process.pid}) was stopped"
        assert processes.stopped() == told
    finally:
        process.kill()


@pytest.mark.parametrize("role", ["worker", "parent"])
def test_only_one_role_and_the_server_are_killed(cog: StandIns, role: str) -> None:
    expected = {pid: role for role, pid in cog.pids.items()}
    wait_until(lambda: cog.processes._roles().items() >= expected.items())
    assert cog.processes.kill(role)
    killed = {role, "server"}
    wait_until(lambda: {process_state(cog.pids[each]) for each in killed} == {"Z"})
    others = (pid for other, pid in cog.pids.items() if other not in killed)
    assert all(process_state(pid) in "RSD" for pid in others)


def test_a_stopped_child_of_the_front_door_is_no_reason_to_end() -> None:
    command = [sys.executable, "-c", SLEEP, "-m", "cog_triton.door.large_bodies", "3"]
    process = subprocess.Popen(command)
    time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        assert CogProcesses(os.getpid()).stopped() is None
    finally:
        process.kill()
        process.wait()
