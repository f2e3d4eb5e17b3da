"""Progress record: when an engine's next step is due, in memory that the keeper reads.

A message a step would cost the engine time, and an engine that holds the GIL in a step could not
send one. So the engine process notes the time, of CLOCK_MONOTONIC, before it waits and before it
computes; it costs some hundred nanoseconds.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

_SIZE = 8


class ProgressRecord:
    """The engine process's side; `descriptor` is of the memory."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("engine-progress")
        os.ftruncate(self.descriptor, _SIZE)
        self._due = memoryview(mmap.mmap(self.descriptor, _SIZE)).cast("d")
        self._due[0] = math.inf

    def due(self, at: float) -> None:
        """The next step begins or ends `at`, in seconds of time.monotonic(); inf while idle."""
        self._due[0] = at


class ProgressReader:
    """The keeper's side, of the process `pid` of our own user."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """Raises OSError when the process is gone."""
        with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
            memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._due = memoryview(memory).cast("d")

    def due(self) -> float:
        """See `ProgressRecord.due`."""
        return float(self._due[0])
