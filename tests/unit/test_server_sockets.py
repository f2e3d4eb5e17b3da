"""Send buffers of another process's Unix sockets are enlarged, other descriptors are not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cog_triton.triton import server_sockets

# Tells the send buffers of a pair and of a TCP socket whenever it is asked.
PROGRAM = """
import socket, sys
pair = socket.socketpair()
tcp = socket.socket()
file = open("/dev/null")
for _ in sys.stdin:
    print(*(s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for s in (*pair, tcp)), flush=True)
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def buffers(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdin
    assert process.stdout
    process.stdin.write("?\n")
    process.stdin.flush()
    return [int(word) for word in process.stdout.readline().split()]


def open_here() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def widened(pid: int) -> int:
    try:
        return server_sockets.enlarge_send_buffers(pid)
    except PermissionError:
        pytest.skip("this system lends no sockets of other processes")


def test_only_unix_sockets_get_a_larger_send_buffer(other: subprocess.Popen[str]) -> None:
    *before, tcp = buffers(other)
    smallest = widened(other.pid)
    *after, tcp_after = buffers(other)
    assert min(after) == smallest > max(before)
    assert tcp_after == tcp
    assert server_sockets.attainable_send_buffer() == smallest


def test_no_file_descriptor_is_leaked(other: subprocess.Popen[str]) -> None:
    buffers(other)
    before = open_here()
    widened(other.pid)
    server_sockets.attainable_send_buffer()
    assert open_here() == before


def test_missing_process_raises_os_error() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(OSError, match="No such"):
        server_sockets.enlarge_send_buffers(process.pid)


def test_default_send_buffer_is_reported_without_permission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that may not borrow descriptors."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        default = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert server_sockets.attainable_send_buffer() == default
