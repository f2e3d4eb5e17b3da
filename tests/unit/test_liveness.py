"""Liveness of Triton's processes: death and SIGSTOP of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_tritonserver import FakeTritonServer

from cog_triton.errors import TritonStartFailed, TritonUnavailable
from cog_triton.front.triton_only_server import _wait_for_exit
from cog_triton.system import reaper

PATIENCE_S = 60


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[FakeTritonServer]:
    # With tenants, so without a gRPC relay, which would outlive the event loop.
    small = FakeTritonServer(tmp_path, cog_triton_keys=tmp_path)
    yield small
    small.server.kill()


async def ready(small: FakeTritonServer) -> None:
    """Started, with both stubs and what all three started."""

    async def is_ready() -> bool:
        return len(of(small, "sleep")) == 3

    async def probe() -> None:
        """Nothing more."""

    await small.server.start(is_ready, probe)


def of(small: FakeTritonServer, word: str) -> list[int]:
    """Its processes with `word` in their command line."""
    lines = {
        pid: Path(f"/proc/{pid}/cmdline").read_text()
        for pid in reaper.descendants(small.server.root_pid)
    }
    return [pid for pid, line in sorted(lines.items()) if word in line]


def trouble_after(small: FakeTritonServer, word: str, number: int) -> str:
    async def main() -> str:
        await ready(small)
        (victim, *_) = [*of(small, word), small.server.root_pid]
        watch = asyncio.ensure_future(small.server.wait_for_failure())
        await asyncio.sleep(0.1)
        assert not watch.done()
        os.kill(victim, number)
        said = await asyncio.wait_for(watch, PATIENCE_S)
        assert str(victim) in said
        return said

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("word", "number", "said"),
    [
        ("bin/tritonserver", signal.SIGKILL, "tritonserver (process"),
        ("tensorrt_llm/1/model.py", signal.SIGKILL, "the stub of tensorrt_llm (process"),
        ("preprocessing/1/model.py", signal.SIGKILL, "the stub of preprocessing (process"),
        ("bin/tritonserver", signal.SIGSTOP, "tritonserver (process"),
        ("preprocessing/1/model.py", signal.SIGSTOP, "the stub of preprocessing (process"),
        ("reaper.py", signal.SIGSTOP, "a process of Triton (process"),
        ("sleep\x00601", signal.SIGSTOP, "a process of Triton (process"),
    ],
)
def test_dead_or_stopped_process_is_named(
    triton: FakeTritonServer, word: str, number: int, said: str
) -> None:
    told = trouble_after(triton, word, number)
    assert told.startswith(said)
    assert told.endswith("has died" if number == signal.SIGKILL else "was stopped")


def test_death_of_other_processes_is_ignored(triton: FakeTritonServer) -> None:
    async def main() -> None:
        await ready(triton)
        watch = asyncio.ensure_future(triton.server.wait_for_failure())
        os.kill(of(triton, "sleep\x00601")[0], signal.SIGKILL)
        assert (await asyncio.wait({watch}, timeout=0.6))[0] == set()
        watch.cancel()

    asyncio.run(main())


def test_a_death_while_an_engine_is_restarted_ends_that(triton: FakeTritonServer) -> None:
    async def not_ready() -> bool:
        return False

    async def main() -> None:
        await ready(triton)
        (stub,) = of(triton, "preprocessing/1/model.py")
        os.kill(stub, signal.SIGKILL)
        said = rf"the stub of preprocessing \(process {stub}\) has died during start-up"
        for _ in range(2):
            with pytest.raises(TritonStartFailed, match=said):
                await triton.server.wait_until_ready(not_ready, asyncio.Event().wait)

    asyncio.run(main())


def test_no_file_descriptor_is_leaked(triton: FakeTritonServer) -> None:
    async def main() -> None:
        await ready(triton)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            watch = asyncio.ensure_future(triton.server.wait_for_failure())
            await asyncio.sleep(0.01)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    asyncio.run(main())


def test_the_death_of_a_stub_ends_a_triton_without_cog(triton: FakeTritonServer) -> None:
    async def main() -> None:
        await ready(triton)
        stop = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(_wait_for_exit(triton.settings, triton.server, stop))
        await asyncio.sleep(0.1)
        (stub,) = of(triton, "preprocessing/1/model.py")
        os.kill(stub, signal.SIGKILL)
        said = rf"the stub of preprocessing \(process {stub}\) has died; its last lines"
        with pytest.raises(TritonUnavailable, match=said):
            await asyncio.wait_for(waiting, PATIENCE_S)

    asyncio.run(main())
