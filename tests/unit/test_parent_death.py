"""A worker ends with its parent, however the parent ends; seen on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from process_trees import running, until

WORKER = """
import sys, threading, time
from cog_triton.system.process_state import exit_with_parent
{start}
print("ready", flush=True)
while True:
    time.sleep(60)
"""
STARTS = {
    "main thread": "exit_with_parent()",
    "a thread that ends": "t = threading.Thread(target=exit_with_parent); t.start(); t.join()",
}
# Starts the worker from a thread that ends at once, tells its pid when it is ready, and waits.
PARENT = """
import subprocess, sys, threading, time
def start():
    global worker
    worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
thread = threading.Thread(target=start)
thread.start()
thread.join()
worker.stdout.readline()
print(worker.pid, flush=True)
if sys.argv[2] == "exit":
    sys.stdin.readline()
    sys.exit()
time.sleep(60)
"""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit"])
def test_the_worker_ends_with_its_parent(start: str, end: str) -> None:
    worker = WORKER.format(start=STARTS[start])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, worker, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pid = None
    try:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.05)
        assert running(pid), "the worker lives as long as its parent does"
        if end == "exit":
            parent.stdin.write(b"\n")
            parent.stdin.flush()
        else:
            parent.send_signal(getattr(signal, end))
        parent.wait(60)
        until(lambda: not running(pid), "the worker ends")
    finally:
        parent.kill()
        parent.communicate()
        if pid is not None and running(pid):
            os.kill(pid, signal.SIGKILL)


TAKES_IT_DOWN = """
import sys, threading
from cog_triton.system import process_state
process_state._FLUSH_S = 0.1
process_state.exit_with_parent()
print("ready", flush=True)
thread = threading.Thread(target=process_state.stop_parent)
thread.start()
thread.join()
threading.Event().wait()
"""


def test_stop_parent_ends_parent_and_worker() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, TAKES_IT_DOWN, "sleep"], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert parent.wait(60) == -signal.SIGKILL
        until(lambda: not running(pid), "the worker ends")
    finally:
        parent.kill()
        parent.communicate()
