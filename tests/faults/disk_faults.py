"""Faults of file systems: one that is full, and one that stalls."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHM = Path("/dev/shm")
_BALLAST = "fault-ballast"
_BLOCK = 1 << 20
# FIFREEZE and FITHAW of linux/fs.h: writers wait in the kernel until the file system thaws.
_FREEZE, _THAW = 0xC0045877, 0xC0045878
_STALL_S, _FLOW_S = 0.9, 0.1


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """The file system of `directory` has no byte left within the block."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _fill(descriptor)
        yield
    finally:
        os.unlink(_BALLAST, dir_fd=descriptor)
        os.close(descriptor)


def _fill(directory: int) -> None:
    ballast = os.open(_BALLAST, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory)
    try:
        size, block = 0, 64 * _BLOCK
        while block >= 1 << 12:
            try:
                os.posix_fallocate(ballast, size, block)
                size += block
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block //= 2
    finally:
        os.close(ballast)


async def stalling(directory: Path, seconds: float) -> None:
    """For some seconds no write to the file system of `directory` ends but at moments."""
    descriptor = os.open(directory, os.O_RDONLY)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            await asyncio.to_thread(fcntl.ioctl, descriptor, _FREEZE, 0)
            try:
                await asyncio.sleep(min(_STALL_S, max(0.0, until - time.monotonic())))
            finally:
                fcntl.ioctl(descriptor, _THAW, 0)
            await asyncio.sleep(_FLOW_S)
    finally:
        os.close(descriptor)
