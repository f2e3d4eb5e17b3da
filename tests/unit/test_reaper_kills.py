"""Reaper: process trees end with their killed parent, or by a kill; seen on real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_trees import PROGRAM, TREE, all_gone, running, tree_pids, until, written
from process_trees import started as started  # a fixture

from cog_triton.system import reaper
from cog_triton.system.reaper import Reaped, spawn


@pytest.fixture
def shm() -> Iterator[tuple[str, list[Path]]]:
    """A prefix and three shared-memory files: two that have it and one that does not."""
    prefix = f"cog_triton_test_{os.getpid()}_"
    files = [Path("/dev/shm") / name for name in (f"{prefix}a", f"{prefix}b", f"x{prefix}")]
    for path in files:
        path.write_bytes(b"x")
    yield prefix, files
    for path in files:
        path.unlink(missing_ok=True)


HOLDER = """
import os, sys, threading, time
from cog_triton.system.reaper import spawn
{body}
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holder(body: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that spawns things, to be killed: the parent in these tests."""
    env = {**os.environ, "PYTHONPATH": str(Path(reaper.__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(body=body)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_nothing_outlives_a_killed_parent(tmp_path: Path, shm: tuple[str, list[Path]]) -> None:
    prefix, files = shm
    script = TREE + "exec sleep 600"
    body = f"spawn(['sh', '-c', {script!r}], grace=0.2, unlink_shm={prefix!r})"
    with holder(body, tmp_path) as parent:
        pids = tree_pids(tmp_path)
        parent.kill()
        all_gone(pids)
    until(lambda: [path.exists() for path in files] == [False, False, True], "files unlinked")


def test_the_command_of_a_killed_parent_gets_the_grace_period(tmp_path: Path) -> None:
    script = "trap 'sleep 0.3; echo bye > bye; exit' TERM; echo up > up; sleep 600 & wait"
    with holder(f"spawn(['sh', '-c', {script!r}], grace=30)", tmp_path) as parent:
        written(tmp_path / "up")
        parent.kill()
        assert written(tmp_path / "bye") == "bye"


def test_concurrent_spawns_do_not_hold_each_others_pipe(tmp_path: Path) -> None:
    body = """
def one(number):
    spawn(["sh", "-c", f"echo $$ > {number}; exec sleep 600"], grace=0.2)
threads = [threading.Thread(target=one, args=[number]) for number in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    with holder(body, tmp_path) as parent:
        pids = {str(number): int(written(tmp_path / str(number))) for number in range(6)}
        parent.kill()
        all_gone(pids)


def test_a_forked_child_of_the_parent_does_not_hold_the_pipe(tmp_path: Path) -> None:
    body = """
spawn(["sh", "-c", "echo $$ > pid; exec sleep 600"], grace=0.2)
pid = os.fork()
if pid == 0:
    os.close(1)
    time.sleep(600)
print(pid, file=open("forked", "w"))
"""
    with holder(body, tmp_path) as parent:
        forked = int(written(tmp_path / "forked"))
        try:
            pid = int(written(tmp_path / "pid"))
            parent.kill()
            until(lambda: not running(pid), "command gone")
            assert running(forked)
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_second_sigterm_kills_at_once(started: list[Reaped], tmp_path: Path) -> None:
    script = TREE + "trap 'echo 1 >> asked' TERM; echo up > up; while :; do sleep 0.01; done"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=600))
    pids = tree_pids(tmp_path)
    written(tmp_path / "up")
    started[0].terminate()
    assert written(tmp_path / "asked") == "1"
    assert started[0].poll() is None
    started[0].terminate()
    assert started[0].wait(60) == 137
    assert not any(map(running, pids.values()))
    assert written(tmp_path / "asked") == "1"


def test_the_command_dies_with_a_killed_reaper(started: list[Reaped], tmp_path: Path) -> None:
    started.append(spawn(["sh", "-c", "echo $$ > pid; exec sleep 600"], cwd=tmp_path))
    pid = int(written(tmp_path / "pid"))
    os.kill(started[0].process.pid, signal.SIGKILL)
    until(lambda: not running(pid), "command gone")  # nobody has asked about it yet
    assert started[0].wait(60) == 137


@pytest.mark.parametrize("reaper_is", ["well", "stopped", "dead"])
def test_kill_works_on_a_stopped_killed_or_ended_reaper(
    reaper_is: str, started: list[Reaped], tmp_path: Path, shm: tuple[str, list[Path]]
) -> None:
    prefix, files = shm
    command = ["sh", "-c", TREE + "exec sleep 600"]
    started.append(spawn(command, cwd=tmp_path, grace=600, unlink_shm=prefix))
    pids = tree_pids(tmp_path)
    if reaper_is == "stopped":
        os.kill(started[0].process.pid, signal.SIGSTOP)
    if reaper_is == "dead":
        os.kill(started[0].process.pid, signal.SIGKILL)
        until(lambda: not running(pids["leader"]), "command gone")
        assert running(pids["daemon"])  # an orphan, in a session of its own
    started[0].kill()
    assert not any(map(running, pids.values()))
    assert started[0].poll() == 137
    assert [path.exists() for path in files] == [False, False, True]
    started[0].kill()  # once more does no harm


@pytest.mark.parametrize("how", ["killed", "asked twice"])
def test_shared_memory_of_a_killed_nested_reaper_is_removed(
    how: str, started: list[Reaped], tmp_path: Path, shm: tuple[str, list[Path]]
) -> None:
    prefix, files = shm
    within = [*PROGRAM, "--grace=600", f"--unlink-shm={prefix}", "--"]
    script = "trap '' TERM; " + TREE + "while :; do sleep 1; done"
    started.append(spawn([*within, "sh", "-c", script], cwd=tmp_path, grace=600))
    pids = tree_pids(tmp_path)
    if how == "killed":
        started[0].kill()
    else:
        started[0].terminate()
        time.sleep(0.2)  # else the two are one signal
        started[0].terminate()
        started[0].wait(60)
    assert not any(map(running, pids.values()))
    assert [path.exists() for path in files] == [False, False, True]


def test_kill_finds_descendants_that_cleared_their_environment(
    started: list[Reaped], tmp_path: Path
) -> None:
    script = "(env -i setsid sh -c 'echo $$ > pid; exec sleep 600' &); exec sleep 600"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=600))
    pid = int(written(tmp_path / "pid"))
    os.kill(started[0].process.pid, signal.SIGSTOP)
    started[0].kill()
    assert not running(pid)


def test_kill_of_one_leaves_the_others_alone(started: list[Reaped], tmp_path: Path) -> None:
    started.append(spawn(["sleep", "600"]))
    # A spawn within a spawn: the outer kill finds what the inner reaper started.
    inner = f"spawn(['sh', '-c', {TREE + 'exec sleep 600'!r}], grace=600).wait()"
    body = f"from cog_triton.system.reaper import spawn; {inner}"
    env = {**os.environ, "PYTHONPATH": str(Path(reaper.__file__).parents[2])}
    started.append(spawn([sys.executable, "-c", body], cwd=tmp_path, env=env))
    pids = tree_pids(tmp_path)
    started[1].kill()
    assert not any(map(running, pids.values()))
    assert started[0].poll() is None
