"""JSON bodies of the front: their bounds, and a child process for large ones."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from scripted_server import wait_until

from cog_triton.errors import InvalidArgument
from cog_triton.front.json_body import JSONLimits, Numbers, inflated, require_bounded
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import Refused
from cog_triton.system.process_state import process_state


def test_depth_counts_brackets_outside_of_strings() -> None:
    limits = JSONLimits(depth=64)
    require_bounded(b"[" * 64 + b"]" * 64, limits)
    require_bounded(b'["' + b"[" * 100 + rb"\"[[" + b'"]', limits)
    require_bounded(b"[" + b"[]," * 1000 + b"{}]", JSONLimits(depth=2))
    for body in (b"[" * 65 + b"]" * 65, b"[[[]]]", b'[[{"a":[]}]]'):
        with pytest.raises(InvalidArgument, match="nested deeper than"):
            require_bounded(body, limits if len(body) > 100 else JSONLimits(depth=2))


@pytest.mark.parametrize(
    "item", [b"0", b"[]", b"{}", b'""', b"null", b"1.5", b'{"a":0}', b'"a,[\\"{"', b" 0\n", b"[0]"]
)
@pytest.mark.parametrize("numbers", Numbers)
def test_values_are_counted_outside_of_strings(item: bytes, numbers: Numbers) -> None:
    body = b'{"a":[' + b",".join([item] * 1000) + b"]}"
    require_bounded(body, JSONLimits(values=4000, numbers=numbers))
    cheap = item.strip().isdigit() or (numbers is Numbers.FREE and item == b"1.5")
    limits = JSONLimits(values=100 if cheap else 900, numbers=numbers)
    if cheap and numbers is Numbers.FREE:
        require_bounded(body, limits)
        return
    with pytest.raises(InvalidArgument, match="MAX_JSON_VALUES"):
        require_bounded(body, limits)


def test_eight_token_ids_count_as_one() -> None:
    ids = json.dumps({"prompt": list(range(1000))}).encode()
    require_bounded(ids, JSONLimits(values=130, numbers=Numbers.IDS))
    with pytest.raises(InvalidArgument, match=r"has \d+ values; 120 at most"):
        require_bounded(ids, JSONLimits(values=120, numbers=Numbers.IDS))
    with pytest.raises(InvalidArgument, match="MAX_JSON_VALUES"):
        require_bounded(ids, JSONLimits(values=130))


def test_what_another_parser_would_read_otherwise_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="UTF-8"):
        require_bounded('{"a":[0]}'.encode("utf-16"), JSONLimits())
    slow = b"[" + b",".join([b"9" * 4000] * 100) + b"]"
    with pytest.raises(InvalidArgument, match="32 characters"):
        require_bounded(slow, JSONLimits())
    require_bounded(b'["' + b"9" * 100_000 + b'"]', JSONLimits())


LARGE = 1 << 20


@pytest.fixture
def bodies() -> Iterator[LargeBodies]:
    made = LargeBodies()
    yield made
    made.close()


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
