"""EMFILE: what a process does that has no file descriptor left for a moment."""

import asyncio
import os
import re
import resource
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import pytest
from loop_thread import call
from scripted_triton import ScriptedTriton, event
from test_request_streams import Running

from cog_triton.engines.generate_stream import GenerateStream
from cog_triton.errors import TritonUnavailable, TritonUnknownError
from cog_triton.serving.admission import Admission
from cog_triton.serving.failure_detection import MemoryLimit
from cog_triton.settings import load_settings
from cog_triton.system.process_state import UNKNOWN, process_state
from cog_triton.triton.server import TritonClient


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


def test_memory_exceeds_no_limit(caplog: pytest.LogCaptureFixture) -> None:
    """What holds much is not found until there is a descriptor; then a restart is due."""
    limit = MemoryLimit(1, Admission(1))

    async def due() -> str:
        with no_descriptors():
            return await limit._excess(os.getpid())

    assert asyncio.run(due()) == ""
    assert "memory is not known" in caplog.text


def test_how_many_requests_run_in_triton_is_not_known() -> None:
    """Then nobody is blamed."""

    async def active() -> int | None:
        async with aclosing(TritonClient(load_settings())) as client:
            with no_descriptors():
                return await client.active_requests()

    assert asyncio.run(active()) is None
