"""Child: real processes, their ends, what they leave, and a worker that ends with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from process_trees import TREE, running, tree_pids, until

from cog_triton.processes.child import Child, described, reap_orphans

SLEEP = ("sleep", "600")


def in_loop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_it_ends_with_the_thread_that_made_it_unless_it_sees_to_that_itself() -> None:
    made: list[Child] = []

    async def make() -> None:
        made.extend(Child(SLEEP, os.environ, own_end=own) for own in (True, False))

    thread = threading.Thread(target=in_loop, args=[make])
    thread.start()
    thread.join()
    stays, ends = made
    assert ends.process.wait(60) == -signal.SIGKILL
    assert stays.process.poll() is None
    stays.process.kill()
    stays.process.wait(60)
    for child in made:
        os.close(child._descriptor)


@pytest.mark.parametrize("ended", [False, True])
def test_all_that_it_started_is_killed_with_it_or_after_its_end(
    ended: bool, tmp_path: Path
) -> None:
    async def scenario() -> None:
        child = Child(["sh", "-c", f"{TREE}\nwait; sleep 600"], os.environ, cwd=tmp_path)
        pids = await asyncio.to_thread(tree_pids, tmp_path)
        if ended:
            child.signal(signal.SIGKILL)
            assert await child.ended == 128 + signal.SIGKILL
        assert child.pids >= (pids - {child.pid} if ended else pids)
        assert (child.pid in child.pids) != ended
        with pytest.raises(TimeoutError, match="survive SIGKILL for -1 s"):
            await child.kill(-1)
        assert await child.kill() == 128 + signal.SIGKILL
        assert not child.pids
        until(lambda: not running(*pids), "all end")

    in_loop(scenario)


def test_the_marks_of_a_sibling_and_a_reaper_above_are_not_its_own() -> None:
    async def scenario() -> None:
        first = Child(SLEEP, {"PATH": os.environ["PATH"], "WORD": "1"})
        own = environment(first.pid)
        second = Child(SLEEP, {**own, "COG_TRITON_REAPED_1": "1"})
        assert len(own) == len(environment(second.pid)) == 3
        assert (first.pids, second.pids) == ({first.pid}, {second.pid})
        await first.kill()
        assert not await second.wait(0)
        await second.kill()

    in_loop(scenario)


def environment(pid: int) -> Mapping[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if word)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("kill -USR1 $$; exit 7", 7, "exited with 7"),  # which it ignores
        ("exit 200", 200, "exited with 200"),
        ("kill -TERM $$", 143, "was killed by SIGTERM"),
    ],
)
def test_its_exit_code_says_how_it_ended(command: str, code: int, said: str) -> None:
    async def scenario() -> None:
        child = Child(["sh", "-c", command], os.environ)
        assert await child.wait(60)
        assert await child.ended == await child.kill() == code
        child.signal(signal.SIGKILL)
        assert described(code) == said

    in_loop(scenario)


def test_its_exit_code_is_no_orphans() -> None:
    async def scenario() -> None:
        child = Child(["sh", "-c", "exit 7"], os.environ)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        reap_orphans()
        assert await child.ended == 7
        reap_orphans()

    in_loop(scenario)


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
