"""Room for what is written, and files that are there complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cog_triton.errors import DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, size: int, *, at_most: bool) -> Iterator[IO[bytes]]:
    """A file that gets the name `path` when it is complete and on the disk; an old one keeps it
    until then. It will have `size` bytes, or `at_most` these.

    Raises:
        DiskFull: as `room`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    what = f"{path}: needs {'up to ' if at_most else ''}{mb(size)}"
    with room(path.parent, what, 0 if at_most else size):
        _remove_abandoned(path)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            temporary.chmod(0o644)
            temporary.replace(path)
            _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _remove_abandoned(path: Path) -> None:
    """What was written for `path` by a process that was killed; a living one holds its lock."""
    for file in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with suppress(OSError), file.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()


@contextmanager
def room(directory: Path, what: str, least: int) -> Iterator[None]:
    """While something is written to `directory`; `what` says it, and its size.

    Raises:
        DiskFull: `least` bytes are not free, or no space is left; says what was, and was free.
    """
    free = shutil.disk_usage(directory).free
    text = f"{what}, {mb(free)} free in {directory}"
    if least > free:
        raise DiskFull(text)
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(f"{text}: {error.strerror}") from error


def mb(size: int) -> str:
    """A size in bytes, to be read."""
    return f"{size / 1e6:.1f} MB"


def _sync(directory: Path) -> None:
    """So that the new name outlives a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
