"""Control groups of fault injection: none is left behind, however a run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import cgroups, memory_faults

TESTS = Path(__file__).parents[1]
LIMITS = ("memory.max", "memory.limit_in_bytes")
OWNER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from faults import cgroups
made = cgroups.group("left", *sys.argv[2:])
print(made.__enter__(), flush=True)
os.read(0, 1)
os._exit(0)
"""
INTERRUPTED = """
import os, runpy, sys
tests = sys.argv.pop(1)
main = runpy.run_path(tests + "/faults/__main__.py")["main"]
from faults import cgroups
from faults.runner import Runner

async def run(runner, plans, jobs):
    made.append(cgroups.group("left", "memory.max", "memory.limit_in_bytes"))
    path = made[0].__enter__()
    cgroups.add(path, os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60"))
    print(path, flush=True)
    raise KeyboardInterrupt  # as a second one, on the way out

made = []
Runner.run = run
code = main()
sys.stdout.flush()
os._exit(code)
"""

pytestmark = pytest.mark.skipif(
    memory_faults.lacking() is not None, reason=str(memory_faults.lacking())
)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that makes a group, says its path, and ends without removing it."""
    command = [sys.executable, "-c", OWNER, str(TESTS), *LIMITS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def path_of(owner: subprocess.Popen[str]) -> Path:
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    assert path.is_dir()
    return path


def test_a_process_may_end_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = os.kill

    def too_late(pid: int, number: int) -> None:
        kill(pid, number)
        os.waitpid(pid, 0)
        kill(pid, number)

    with cgroups.group("raced", *LIMITS) as path:
        child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
        cgroups.add(path, child)
        monkeypatch.setattr(os, "kill", too_late)
    assert not path.exists()


def test_a_group_of_a_runner_that_was_killed_is_removed(owner: subprocess.Popen[str]) -> None:
    path = path_of(owner)
    cgroups.clear()
    assert path.is_dir()  # its owner lives
    owner.kill()
    owner.wait()
    assert path.is_dir()
    cgroups.clear()
    assert not path.exists()


def test_a_start_removes_what_another_run_has_left(owner: subprocess.Popen[str]) -> None:
    path = path_of(owner)
    owner.kill()
    owner.wait()
    run = subprocess.run(
        [sys.executable, TESTS / "faults", "--only", "no-such"], capture_output=True, text=True
    )
    assert run.returncode == 2, run.stderr
    assert not path.exists()


def test_an_interrupt_on_the_way_out_leaves_no_group(tmp_path: Path) -> None:
    options = ["--engine", "mock", "--faults", "20", "--results", tmp_path]
    command = [sys.executable, "-c", INTERRUPTED, TESTS, *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "interrupted" in run.stdout
    assert not Path(run.stdout.splitlines()[0]).exists()
