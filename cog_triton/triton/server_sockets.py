"""Sockets of a running tritonserver, duplicated from it (pidfd_getfd(2)): it has no such options.

Queues of its HTTP threads: libevhtp passes responses to a thread through a pair of Unix sockets,
without checking for errors (evthr_defer; Triton 24.10 and later). With Linux's default send buffer,
a thread that gets no CPU loses every response after the first 277, so they get larger buffers.
Where that is not permitted, net.core.wmem_default of the host decides.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # the same on all machines


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """Each socket of process `pid`, as a duplicate that is closed with the next one.

    Raises OSError if the system does not permit it, or there is no such process.
    """
    process = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if not _target(entry).startswith("socket:"):
                continue
            descriptor = _LIBC.syscall(_PIDFD_GETFD, process, int(entry.name), 0)
            if descriptor < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with socket.socket(fileno=descriptor) as found:
                yield found
    finally:
        os.close(process)


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""


RESPONSE_BYTES = 768
"""Bytes of a queue that one response takes, however long: the kernel counts whole buffers."""

_SEND_BUFFER_BYTES = 8 << 20  # the kernel doubles it
_SO_SNDBUFFORCE = 32


def enlarge_send_buffers(pid: int) -> int:
    """Set the send buffer of each Unix socket of process `pid` to 16 MB.

    Without CAP_NET_ADMIN, to at most twice net.core.wmem_max. Returns the bytes of the smallest, 0
    if there is none. Raises OSError if the system does not permit it.
    """
    return min(filter(None, map(_enlarge_send_buffer, sockets_of(pid))), default=0)


def attainable_send_buffer() -> int:
    """Bytes of a queue of a Triton that is started on this machine."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with suppress(OSError):
            next(sockets_of(os.getpid()), None)  # permitted there, permitted elsewhere
            _enlarge_send_buffer(ours)
        return ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _enlarge_send_buffer(found: socket.socket) -> int:
    """Enlarge a socket's send buffer; returns its bytes, 0 if it is no Unix socket."""
    if found.family != socket.AF_UNIX:
        return 0
    for option in (_SO_SNDBUFFORCE, socket.SO_SNDBUF):
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, option, _SEND_BUFFER_BYTES)
            break
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
