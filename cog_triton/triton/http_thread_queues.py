"""Workaround: larger queues for Triton's HTTP threads, which drop responses when a queue is full.

libevhtp passes responses to a thread through a pair of Unix sockets, without checking for errors
(evthr_defer; Triton 24.10 and later): with Linux's default send buffer, a thread that gets no CPU
loses every response after the first 277. Triton has no option for that and creates the sockets
itself, so they are duplicated from it (pidfd_getfd(2)) and given larger buffers. Most containers
do not permit that; there, net.core.wmem_default of the host decides.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RESPONSE_BYTES = 768
"""Bytes of a queue that one response takes, however long: the kernel counts whole buffers."""

_SEND_BUFFER_BYTES = 8 << 20  # the kernel doubles it
_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # the same on all machines
_SO_SNDBUFFORCE = 32


def enlarge_send_buffers(pid: int) -> int:
    """Set the send buffer of each Unix socket of process `pid` to 16 MB.

    Without CAP_NET_ADMIN, to at most twice net.core.wmem_max. Returns the bytes of the smallest, 0
    if there is none. Raises OSError if the system does not permit it.
    """
    with _pidfd(pid) as process:
        sockets = [
            int(entry.name)
            for entry in Path(f"/proc/{pid}/fd").iterdir()
            if _target(entry).startswith("socket:")
        ]
        return min(
            filter(None, (_enlarge_send_buffer(process, number) for number in sockets)), default=0
        )


def attainable_send_buffer() -> int:
    """Bytes of a queue of a Triton that is started on this machine."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with suppress(OSError), _pidfd(os.getpid()) as process:
            _enlarge_send_buffer(process, ours.fileno())
        return ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _enlarge_send_buffer(process: int, number: int) -> int:
    """Enlarge a socket's send buffer; returns its bytes, 0 if it is no Unix socket."""
    descriptor = _LIBC.syscall(_PIDFD_GETFD, process, number, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=descriptor) as found:
        if found.family != socket.AF_UNIX:
            return 0
        for option in (_SO_SNDBUFFORCE, socket.SO_SNDBUF):
            with suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, option, _SEND_BUFFER_BYTES)
                break
        return found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""
