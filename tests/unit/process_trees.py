"""Process trees: a command with a daemon and a stubborn child, and what has become of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cog_triton.system import reaper
from cog_triton.system.reaper import Reaped

PROGRAM = [sys.executable, "-S", "-I", reaper.__file__]

# Starts a daemon (its own session, parent gone) and a process that ignores SIGTERM, then waits.
TREE = """
(setsid sh -c 'echo $$ > daemon; exec sleep 600' &)
sh -c 'trap "" TERM; echo $$ > stubborn; exec sleep 600' &
until [ -s daemon ] && [ -s stubborn ]; do sleep 0.01; done
echo $$ > leader
"""
TREE_NAMES = ("daemon", "stubborn", "leader")


def until(condition: Callable[[], object], what: str) -> None:
    """Give the condition, which comes about within milliseconds, ample time."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def written(path: Path) -> str:
    """The file's text once a whole line is there."""
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"a line in {path}")
    return path.read_text().strip()


def tree_pids(directory: Path) -> dict[str, int]:
    """Processes of a `TREE` that was started in `directory`, by name; all of them run."""
    pids = {name: int(written(directory / name)) for name in reversed(TREE_NAMES)}
    assert all(running(pid) for pid in pids.values())
    return pids


def all_gone(pids: dict[str, int]) -> None:
    """Wait until none of them runs."""
    until(lambda: not any(map(running, pids.values())), f"{pids} gone")


@pytest.fixture
def started() -> Iterator[list[Reaped]]:
    """What a test spawned; whatever is left is killed."""
    reaped: list[Reaped] = []
    yield reaped
    for one in reaped:
        one.kill()
