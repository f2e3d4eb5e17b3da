"""Reaper: process trees end with their killed parent, or by a kill; seen on real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_trees import TREE, running, tree_pids, until, written
from process_trees import started as started  # a fixture

from cog_triton.system import reaper
from cog_triton.system.reaper import Reaped, spawn

Names = tuple[str, Callable[[], list[bool]]]


@pytest.fixture
def shm() -> Iterator[Names]:
    """A prefix; and whether a file and a directory that have it, and another file, are there."""
    prefix = f"cog_triton_test_{os.getpid()}_"
    names = [Path("/dev/shm") / name for name in (f"{prefix}1", f"{prefix}2", f"x{prefix}")]
    names[0].mkdir()
    [path.touch() for path in names]
    yield prefix, lambda: [path.exists() for path in names]
    reaper.unlink_shm(prefix)
    names[2].unlink()


def test_nothing_outlives_a_killed_parent(tmp_path: Path, shm: Names) -> None:
    script = f"trap 'echo bye > bye; exit' TERM; {TREE} while :; do sleep 0.01; done"
    code = f"""import os, time; from cog_triton.system.reaper import spawn
spawn(['sh', '-c', {script!r}], grace=2, unlink_shm={shm[0]!r})
print(os.fork() or os.close(1) or time.sleep(60), flush=True)
time.sleep(60)"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        pids, forked = tree_pids(tmp_path), int(parent.stdout.readline())
        parent.kill()
        until(lambda: not running(*pids) and shm[1]() == [False, False, True], "all gone")
        assert written(tmp_path / "bye") == "bye"  # SIGTERM comes first
        assert running(forked)  # which has no copy of the pipe
        os.kill(forked, signal.SIGKILL)


def test_a_second_stop_kills_at_once(started: list[Reaped], tmp_path: Path) -> None:
    script = f"trap 'echo 1 >> asked' TERM; {TREE} while :; do sleep 0.01; done"
    started.append(spawn(["sh", "-c", script], cwd=tmp_path, grace=600))
    pids = tree_pids(tmp_path)
    started[0].terminate()
    assert written(tmp_path / "asked") == "1"
    started[0].terminate()
    assert started[0].wait(60) == 137
    assert not running(*pids)
    assert written(tmp_path / "asked") == "1"


@pytest.mark.parametrize("number", [0, signal.SIGSTOP, signal.SIGKILL])
def test_kill_works_on_a_running_stopped_or_killed_reaper(
    number: int, started: list[Reaped], tmp_path: Path, shm: Names
) -> None:
    unmarked = "(env -i setsid sh -c 'echo $$ > unmarked; exec sleep 600' &)\n" + TREE
    command = ["sh", "-c", (TREE if number == signal.SIGKILL else unmarked) + "exec sleep 600"]
    started.append(spawn(command, cwd=tmp_path, grace=600, unlink_shm=shm[0]))
    started.append(spawn(["sleep", "600"]))
    pids = tree_pids(tmp_path)
    os.kill(started[0].process.pid, number)
    if number == signal.SIGKILL:
        until(lambda: len(running(*pids)) == 2, "the command ends, the others are orphans")
        assert started[0].wait(60) == 137  # has killed them
    else:
        pids.add(int(written(tmp_path / "unmarked")))
        started[0].kill()
    assert not running(*pids)
    assert shm[1]() == [False, False, True]
    started[0].kill()  # once more does no harm
    assert (started[0].poll(), started[1].poll()) == (137, None)
