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
        self.descriptor = os.memfd_create("shared-time")
        os.ftruncate(self.descriptor, _SIZE)
        self._time = memoryview(mmap.mmap(self.descriptor, _SIZE)).cast("d")
        self.set(math.inf)

    def set(self, at: float) -> None:
        """Write a time, in seconds of time.monotonic(); inf for never, or not yet."""
        self._time[0] = at


class SharedTimeReader:
    """The reader's side, of the process `pid` of our own user."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """Raises OSError when the process is gone; what is open then can be read on."""
        with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
            memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._time = memoryview(memory).cast("d")

    def read(self) -> float:
        """See `SharedTime.set`."""
        return float(self._time[0])
