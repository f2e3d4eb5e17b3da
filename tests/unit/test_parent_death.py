"""A worker ends with its parent, however the parent ends; seen on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from process_trees import running, until

WORKER = """
import sys, threading
from cog_triton.system import process_state
def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
in_thread(process_state.exit_with_parent)
print("ready", flush=True)
if sys.argv[1] == "stop_parent":
    sys.stdin.readline()
    process_state._FLUSH_S = 0.1
    in_thread(process_state.stop_parent)
threading.Event().wait()
"""
# Starts the worker in a thread that ends at once, says its pid when it is ready, and waits.
PARENT = """
import subprocess, sys, threading
def start():
    global worker
    command = [sys.executable, "-c", *sys.argv[1:]]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
thread = threading.Thread(target=start)
thread.start()
thread.join()
worker.stdout.readline()
print(worker.pid, flush=True)
if sys.argv[2] == "stop_parent":
    worker.wait()
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["kill", "exit", "stop_parent"])
def test_parent_and_worker_end(end: str) -> None:
    command, pipe = [sys.executable, "-c", PARENT, WORKER, end], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert running(pid), "the thread that called for it has ended, and the parent has not"
        try:
            if end == "kill":
                parent.kill()
            parent.communicate(b"" if end == "kill" else b"\n", 60)
            assert parent.returncode == (0 if end == "exit" else -signal.SIGKILL)
            until(lambda: not running(pid), "the worker ends")
        finally:
            parent.kill()
            if running(pid):
                os.kill(pid, signal.SIGKILL)
