"""Watches over processes that cannot look for a while: no file descriptor is left, for example."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator

import pytest

from cog_triton.processes import watchdog
from cog_triton.triton import liveness

NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    """Two processes that sleep."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started[0].pid, started[1].pid
    for process in started:
        process.kill()
        process.wait()


def found_after_errors(
    watch: Callable[[Callable[[], set[int]]], Awaitable[str]], *all_: int
) -> str:
    """What a watch says once the last of `all_` is stopped, whose list can be read once."""
    looks = 0

    def read() -> set[int]:
        nonlocal looks
        looks += 1
        if looks > 1:
            raise NO_DESCRIPTOR
        return set(all_)

    async def main() -> str:
        watching = asyncio.ensure_future(watch(read))
        while looks < 3 and not watching.done():
            await asyncio.sleep(0.01)
        os.kill(all_[-1], signal.SIGSTOP)
        return await asyncio.wait_for(watching, 60)

    return asyncio.run(main())


def test_a_watchdog_keeps_the_processes_that_it_knew(
    pids: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_PERIOD_S", 0.01)
    said = found_after_errors(lambda read: watchdog.watch("it", pids[0], read, lambda: 9e9), *pids)
    assert said == f"process {pids[1]} of it was stopped"


def test_the_watch_over_tritons_start_keeps_the_processes_that_it_knew(
    pids: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_POLL_S", 0.01)

    def watch(read: Callable[[], set[int]]) -> Awaitable[str]:
        monkeypatch.setattr(liveness, "with_descendants", lambda _root: read())
        return liveness.wait_until_stopped(pids[0])

    said = found_after_errors(watch, *pids)
    assert said == f"a process of Triton (process {pids[1]}) was stopped"
