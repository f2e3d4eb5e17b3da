"""Liveness of Triton's processes: death and SIGSTOP of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_tritonserver import FakeTritonServer
from local_parent import linked
from small_front import on_loop

from cog_triton.errors import TritonStartFailed
from cog_triton.system import reaper
from cog_triton.system.process_state import process_state


@asynccontextmanager
async def ready(directory: Path) -> AsyncIterator[FakeTritonServer]:
    """A Triton that is started, with both stubs and what all three started."""

    async def is_ready() -> bool:
        return len(of(small, "sleep")) == 3

    async with linked(directory) as parent:
        small = FakeTritonServer(directory, parent)
        await small.server.start(is_ready, nothing)
        yield small


async def wait_until_gone(pid: int) -> None:
    while process_state(pid) not in ("", "Z"):
        await asyncio.sleep(0.01)


async def nothing() -> None:
    """A probe that finds all well."""


def of(small: FakeTritonServer, word: str) -> list[int]:
    """Its processes with `word` in their command line."""
    lines = {
        pid: Path(f"/proc/{pid}/cmdline").read_text()
        for pid in reaper.descendants(small.server.root_pid)
    }
    return [pid for pid, line in sorted(lines.items()) if word in line]


@pytest.mark.parametrize(
    ("word", "number", "said"),
    [
        ("bin/tritonserver", signal.SIGKILL, "tritonserver"),
        ("tensorrt_llm/1/model.py", signal.SIGKILL, "the stub of tensorrt_llm"),
        ("preprocessing/1/model.py", signal.SIGSTOP, ""),
        ("reaper.py", signal.SIGSTOP, ""),
        ("sleep\x00601", signal.SIGSTOP, ""),
    ],
)
@on_loop
async def test_dead_or_stopped_process_is_named(
    tmp_path: Path, word: str, number: int, said: str
) -> None:
    async with ready(tmp_path) as triton:
        (victim, *_) = [*of(triton, word), triton.server.root_pid]
        watch = asyncio.ensure_future(triton.server.wait_for_failure())
        await asyncio.sleep(0.1)
        assert not watch.done()
        os.kill(victim, number)
        found = await watch
        if said:
            assert found == f"{said} (process {victim}) has died"
        else:
            assert found == f"process {victim} of Triton was stopped"
            await wait_until_gone(victim)


@on_loop
async def test_a_death_while_an_engine_is_restarted_ends_that(tmp_path: Path) -> None:
    async def not_ready() -> bool:
        return False

    async with ready(tmp_path) as triton:
        (stub,) = of(triton, "preprocessing/1/model.py")
        os.kill(stub, signal.SIGKILL)
        said = rf"the stub of preprocessing \(process {stub}\) has died during start-up"
        for _ in range(2):
            with pytest.raises(TritonStartFailed, match=said):
                await triton.server.wait_until_ready(not_ready, nothing)
