"""Process trees: a command with a daemon and a stubborn child, and what has become of them."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cog_triton.system import reaper
from cog_triton.system.reaper import Reaped

PROGRAM = [sys.executable, "-S", "-I", reaper.__file__]
TREE = """
(setsid sh -c 'echo $$ > daemon; exec sleep 600' &)
sh -c 'trap "" TERM; echo $$ > stubborn; exec sleep 600' &
until [ -s daemon ] && [ -s stubborn ]; do sleep 0.01; done
echo $$ > leader
"""


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.01)


async def eventually(condition: Callable[[], object]) -> None:
    """As `until`, within the event loop."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within 60 s"
        await asyncio.sleep(0.01)


def running(*pids: int) -> set[int]:
    """Those of the processes that are there, and no zombies."""
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if b") Z " not in Path(f"/proc/{pid}/stat").read_bytes():
                found.add(pid)
    return found


def written(path: Path) -> str:
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"a line in {path}")
    return path.read_text().strip()


def tree_pids(directory: Path) -> set[int]:
    """Processes of a `TREE` that was started in `directory`; all of them run."""
    pids = {int(written(directory / name)) for name in ("leader", "stubborn", "daemon")}
    assert running(*pids) == pids
    return pids


@pytest.fixture
def started() -> Iterator[list[Reaped]]:
    yield (reaped := [])
    for one in reaped:
        one.kill()
