"""EMFILE: what a process does that has no file descriptor left for a moment."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_triton_connections import Seen

from cog_triton.engines.generate_stream import GenerateEndpoint
from cog_triton.errors import TritonUnavailable, TritonUnknownError
from cog_triton.system.process_state import UNKNOWN, process_state
from cog_triton.triton.triton_connections import TritonConnections


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


def test_a_request_that_gets_no_socket_is_told_to_try_again() -> None:
    connections = TritonConnections("http://127.0.0.1:9")
    try:
        with no_descriptors(), pytest.raises(TritonUnavailable, match="Too many open files; try"):
            connections.send("/", b"{}", Seen())
    finally:
        connections.close()


def test_a_stream_that_gets_no_socket_is_told_to_try_again() -> None:
    endpoint = GenerateEndpoint.at("http://127.0.0.1:9", "m", TritonUnknownError, 1)
    stream = endpoint.request({}, "id").events()
    with no_descriptors(), pytest.raises(TritonUnavailable, match="Too many open files; try"):
        next(stream)
