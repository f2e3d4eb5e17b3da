"""Shared time: a point in time in memory of one process that another process of ours reads.

A message each time would cost the writer more than the some hundred nanoseconds of this, and a
process that holds the GIL, or has died, could not send one.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

_SIZE = 8


class SharedTime:
    """The writer's side; `descriptor` is of the memory."""

    def __init__(self) -> None:
        """Raises OSError where there is no room."""
        self.descriptor = os.memfd_create("shared-time")
        os.posix_fallocate(self.descriptor, 0, _SIZE)  # a write without a block is SIGBUS
        self._time = memoryview(mmap.mmap(self.descriptor, _SIZE)).cast("d")
        self.set(math.inf)

    def set(self, at: float) -> None:
        """Write a time, in seconds of time.monotonic(); inf for never, or not yet."""
        self._time[0] = at


def file_of(pid: int, descriptor: int) -> Path:
    """File of a descriptor of the process `pid`, which must be of our own user namespace."""
    return Path(f"/proc/{pid}/fd/{descriptor}")


class SharedTimeReader:
    """The reader's side, of a process of our own user."""

    def __init__(self, file: Path) -> None:
        """Raises OSError when `file` is gone; what is open then can be read on."""
        with file.open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._time = memoryview(memory).cast("d")

    def read(self) -> float:
        """See `SharedTime.set`."""
        return float(self._time[0])
