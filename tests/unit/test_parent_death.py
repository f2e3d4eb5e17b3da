"""A worker ends with its parent, however the parent ends; seen on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from process_trees import running, until

WORKER = """
import threading
from cog_triton.system.process_state import exit_with_parent
thread = threading.Thread(target=exit_with_parent)
thread.start()
thread.join()
print("ready", flush=True)
threading.Event().wait()
"""
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


@contextmanager
def parent_of(worker: str, end: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    command = [sys.executable, "-c", PARENT, worker, end]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            yield parent, pid
            until(lambda: not running(pid), "the worker ends")
        finally:
            parent.kill()
            if running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit"])
def test_the_worker_ends_with_its_parent(end: str) -> None:
    with parent_of(WORKER, end) as (parent, pid):
        assert running(pid), "the thread that called for it has ended, and the parent has not"
        if end == "exit":
            parent.communicate(b"\n")
        else:
            parent.send_signal(getattr(signal, end))
        parent.wait(60)


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
    with parent_of(TAKES_IT_DOWN, "sleep") as (parent, _):
        assert parent.wait(60) == -signal.SIGKILL
