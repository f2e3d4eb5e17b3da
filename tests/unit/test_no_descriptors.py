"""EMFILE: what a process does that has no file descriptor left for a moment."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from loop_thread import call
from scripted_triton import ScriptedTriton, event
from small_front import on_loop, until
from test_request_streams import Running

from cog_triton.engines.generate_stream import GenerateStream
from cog_triton.errors import TritonUnavailable, TritonUnknownError
from cog_triton.processes import child
from cog_triton.system.process_state import UNKNOWN, process_state


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_cannot_be_looked_at_is_not_called_dead() -> None:
    with no_descriptors():
        state = process_state(os.getpid())
    assert state == UNKNOWN
    assert process_state(os.getpid()) in "RS"


def test_a_request_whose_stream_gets_no_socket_says_to_try_again() -> None:
    with ScriptedTriton([event(output_ids=5)]) as triton, triton.connected() as streams:
        call(streams.disconnect)
        with no_descriptors():
            call(streams.open, {})
            _, error = Running(streams).wait()
        assert re.match(r"E2105 (.|\n)*Too many open files(.|\n)*; try again", str(error))
        assert Running(streams).wait() == ([5], None)


def test_a_stream_that_gets_no_socket_is_told_to_try_again() -> None:
    stream = GenerateStream("m", "id", {}, TritonUnknownError).events()
    with no_descriptors(), pytest.raises(TritonUnavailable, match="Too many open files"):
        next(stream)


@pytest.mark.parametrize("mends", [False, True])
@on_loop
async def test_a_watch_knows_its_last_look(monkeypatch: pytest.MonkeyPatch, mends: bool) -> None:
    looks: list[int] = []

    def read(root: int) -> set[int]:
        looks.append(root)
        if len(looks) > 1:
            raise OSError("no file descriptor is left")
        return {sleeping.pid}

    monkeypatch.setattr(child.reaper, "descendants", read)
    it: Any = SimpleNamespace(pid=os.getpid(), ended=asyncio.Future(), wait=asyncio.sleep)
    monkeypatch.setattr(child, "_PERIOD_S", 0.01)
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        watching = asyncio.ensure_future(child.watch("it", it, mends=mends))
        await until(lambda: len(looks) == 3 or watching.done())
        sleeping.send_signal(signal.SIGSTOP)
        await until(lambda: watching.done() or sleeping.poll() is not None)
        assert mends or await watching == f"process {sleeping.pid} of it was stopped"
        watching.cancel()
        sleeping.kill()
