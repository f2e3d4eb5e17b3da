"""File locks: one process of this machine at a time, released with it, however it ends."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cog_triton.errors import BuildCancelled

_POLL_S = 0.2


@contextmanager
def waiting(
    path: Path, say: Callable[[], None], stop: threading.Event | None = None
) -> Iterator[None]:
    """Hold the lock `path`; waits while another process does.

    Args:
        path: the file to lock; it and its directory are made, and the file is removed afterwards.
        say: called once, if it has to wait.
        stop: ends the waiting when it is set.

    Raises:
        BuildCancelled: `stop` was set while waiting.
    """
    stop = stop or threading.Event()
    descriptor = attempt(path)
    if descriptor is None:
        say()
    while descriptor is None:
        if stop.wait(_POLL_S):
            raise BuildCancelled(f"stopped while waiting for {path}")
        descriptor = attempt(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def attempt(path: Path) -> int | None:
    """A descriptor that holds the lock `path` until it is closed; None if another one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the file that we locked.
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
