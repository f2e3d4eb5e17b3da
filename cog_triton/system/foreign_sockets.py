"""Sockets of another process of ours, duplicated from it (pidfd_getfd(2)).

Most containers do not permit that.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
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
