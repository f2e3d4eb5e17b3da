"""Shared time: a point in time in memory of two processes of ours, which one of them writes.

A message each time would cost the writer more than the some hundred nanoseconds of this, and a
process that holds the GIL, or has died, could not send one.
"""

from __future__ import annotations

import math
import mmap
import os

_SIZE = 8


class SharedTime:
    """A time in seconds of time.monotonic(); inf for never, or not yet, as it is at first.

    `descriptor` is of the memory, for the other process.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """New, or that of another process; raises OSError if there is no room."""
        self.descriptor = os.memfd_create("shared-time") if descriptor is None else descriptor
        try:
            if descriptor is None:
                os.posix_fallocate(self.descriptor, 0, _SIZE)  # a write without a block is SIGBUS
            self._time = memoryview(mmap.mmap(self.descriptor, _SIZE)).cast("d")
        except OSError:
            self.close()
            raise
        if descriptor is None:
            self.set(math.inf)

    def set(self, at: float) -> None:
        """Write a time."""
        self._time[0] = at

    def read(self) -> float:
        """The time."""
        return self._time[0]

    def close(self) -> None:
        """Close the descriptor; the memory stays."""
        os.close(self.descriptor)
