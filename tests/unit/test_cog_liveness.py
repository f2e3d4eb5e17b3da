"""Liveness of Cog's processes, by stand-ins with the same command lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from scripted_server import wait_until

from cog_triton.serving.cog_health import CogProcesses
from cog_triton.system import reaper
from cog_triton.system.process_state import process_state

PATIENCE_S = 60
SLEEP = "import time; time.sleep(60)"
COMMANDS = {
    "server": [sys.executable, "-c", SLEEP, "cog_triton.front.server"],
    "parent": [sys.executable, "-c", SLEEP, "cog.server.http"],
    "worker": [sys.executable, "-c", f"{SLEEP}; coglet.server._run_worker()"],
}


# Their parent, so that servers which other tests keep are not among its descendants.


def test_a_stopped_reaper_is_named() -> None:
    process = reaper.spawn(COMMANDS["server"])
    try:
        processes = CogProcesses(process.process.pid)
        wait_until(lambda: len(processes._roles()) == 2)
        assert processes.stopped() is None
        process.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: processes.stopped() is not None)
        line = f"Cog's server's reaper (process {process.process.pid}) was stopped"
        assert processes.stopped() == line
    finally:
        process.kill()


@pytest.mark.parametrize("stop", [False, True])
def test_the_server_is_to_fail_its_requests_even_if_it_was_stopped(stop: bool) -> None:
    process = reaper.spawn(COMMANDS["server"])
    try:
        processes = CogProcesses(process.process.pid)
        wait_until(lambda: "server" in processes._roles().values())
        (pid,) = (pid for pid, role in processes._roles().items() if role == "server")
        if stop:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: process_state(pid) == "T")
        processes.fail_requests()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGUSR1
    finally:
        process.kill()


def test_a_stopped_child_of_the_server_is_no_reason_to_end() -> None:
    command = [sys.executable, "-c", SLEEP, "-m", "cog_triton.front.large_bodies", "3"]
    process = subprocess.Popen(command)
    time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        assert CogProcesses(os.getpid()).stopped() is None
    finally:
        process.kill()
        process.wait()
