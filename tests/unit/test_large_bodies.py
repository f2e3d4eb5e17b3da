"""Work on large bodies in a child of the front, which leaves nothing when either dies."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from scripted_server import wait_until

from cog_triton.errors import InvalidArgument
from cog_triton.front.json_body import JSONLimits, Numbers, inflated, require_bounded
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import Refused
from cog_triton.front.prediction_body import prepared
from cog_triton.front.triton_schema import ModelTensors, rewritten_generation, rewritten_inference
from cog_triton.system.process_state import process_state

LARGE = 1 << 20


@pytest.fixture
def bodies() -> Iterator[LargeBodies]:
    made = LargeBodies()
    yield made
    made.close()


def test_large_bodies_alone_are_for_another_process(bodies: LargeBodies) -> None:
    async def main() -> list[int]:
        return [await bodies.run(size, os.getpid) for size in (10, LARGE, LARGE)]

    here, there, again = asyncio.run(main())
    assert here == os.getpid() != there == again


def test_the_event_loop_runs_on_meanwhile(bodies: LargeBodies, tmp_path: Path) -> None:
    """The work ends only when the loop opens the other end of a pipe."""
    os.mkfifo(pipe := tmp_path / "pipe")

    async def main() -> None:
        waiting = asyncio.ensure_future(bodies.run(LARGE, os.open, str(pipe), os.O_RDONLY))
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        while not waiting.done():
            with suppress(OSError):  # the work has not begun
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            await asyncio.sleep(0.001)
        assert waiting.result() > 0

    asyncio.run(main())


def test_what_it_raises_is_raised_here(bodies: LargeBodies) -> None:
    body = b"x" * LARGE
    with pytest.raises(InvalidArgument, match="body: not gzip"):
        asyncio.run(bodies.run(LARGE, inflated, body, "gzip", LARGE))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        asyncio.run(bodies.run(LARGE, divmod, 1, 0))
    assert asyncio.run(bodies.run(LARGE, inflated, gzip.compress(body), "gzip", LARGE)) == body


def test_a_death_is_a_coded_503_and_the_next_body_is_taken(bodies: LargeBodies) -> None:
    first = asyncio.run(bodies.run(LARGE, os.getpid))
    with pytest.raises(Refused, match="E2107") as caught:
        asyncio.run(bodies.run(LARGE, os._exit, 3))
    assert caught.value.status == 503
    second = asyncio.run(bodies.run(LARGE, os.getpid))
    os.kill(second, signal.SIGKILL)
    wait_for_end(second)
    third = asyncio.run(bodies.run(LARGE, os.getpid))
    assert len({first, second, third}) == 3


def test_a_process_that_hangs_is_replaced(bodies: LargeBodies) -> None:
    first = asyncio.run(bodies.run(LARGE, os.getpid))
    assert bodies._child is not None
    bodies._child.connection.settimeout(0.5)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(Refused, match="E2107"):
        asyncio.run(bodies.run(LARGE, os.getpid))
    assert asyncio.run(bodies.run(LARGE, os.getpid)) != first


def test_closing_ends_what_is_being_worked_on(bodies: LargeBodies) -> None:
    async def main() -> None:
        pid = await bodies.run(LARGE, os.getpid)
        waiting = asyncio.ensure_future(bodies.run(LARGE, time.sleep, 3600))
        await asyncio.sleep(0.05)
        bodies.close()
        with pytest.raises(Refused):
            await waiting
        assert not Path(f"/proc/{pid}").exists()

    asyncio.run(main())


KILLED = """
import asyncio, os, signal
from pathlib import Path
from cog_triton.front.large_bodies import LargeBodies

bodies = LargeBodies()
child = asyncio.run(bodies.run(1 << 20, os.getpid))
print(child, flush=True)
for pid in (os.getpid(), child):
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/dev/shm" in line:
            print(line, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_server_leaves_no_process_and_no_shared_memory() -> None:
    """Neither has a semaphore or anything else in /dev/shm that someone would have to remove."""
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    child, *shared = done.stdout.splitlines()
    assert shared == []
    wait_for_end(int(child))


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended; as a zombie, it has."""
    wait_until(lambda: process_state(pid) in ("Z", ""))


def test_arguments_and_results_cross_as_annotations_tell(bodies: LargeBodies) -> None:
    def runs(function: Callable[..., Any], *arguments: object) -> None:
        assert asyncio.run(bodies.run(LARGE, function, *arguments)) == function(*arguments)

    tensors = ModelTensors({"text_input": "BYTES"}, frozenset({"text_output"}))
    for numbers in Numbers:
        limits = JSONLimits(9, 99, numbers)
        runs(rewritten_generation, b'{"text_input": "a\\ud800"}', limits, tensors)
        runs(require_bounded, b"[1, 2]", limits)
    runs(rewritten_inference, b'{"inputs": []}', b"14", JSONLimits(), tensors)
    for body in (b'{"webhook": "http://c"}', b'{"input": {"\\ud800": 1}}'):
        runs(prepared, body, frozenset({"prompt"}), "http://b/")
