"""Fault injections by themselves, on processes that are no server's."""

import asyncio
import signal

import pytest
from faults import memory_faults

pytestmark = pytest.mark.skipif(
    memory_faults.lacking() is not None, reason=str(memory_faults.lacking())
)


async def oom_killed(words: tuple[str, ...]) -> int:
    victim = await asyncio.create_subprocess_exec(*words)
    await memory_faults.oom_kill(victim.pid)
    return await victim.wait()


def test_the_kernel_kills_what_is_out_of_memory() -> None:
    held = "import time; held = bytearray(b'x') * (64 << 20); time.sleep(60)"
    assert asyncio.run(oom_killed(("python3", "-c", held))) == -signal.SIGKILL


def test_the_process_that_asks_for_memory_may_end_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_faults, "_GREEDY", "")
    assert asyncio.run(oom_killed(("sleep", "2"))) == 0
