"""Atomic writes, with a full disk as a coded error."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
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
def writing(path: Path, size: int, *, at_most: bool, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` once it is complete and synced to the disk.

    It will have `size` bytes, or, with `at_most`, no more than these, and this `mode`.

    Raises:
        DiskFull: as `disk_full_errors`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    what = f"{path}: needs {'up to ' if at_most else ''}{megabytes(size)}"
    with disk_full_errors(path.parent, what, 0 if at_most else size):
        _remove_abandoned(path)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            temporary.chmod(mode)
            temporary.replace(path)
            sync_directory(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: object) -> None:
    """Write JSON to a file, atomically."""
    text = json.dumps(value).encode()
    with writing(path, len(text), at_most=False) as file:
        file.write(text)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` that killed processes left; a running one locks its own."""
    for file in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with suppress(OSError), file.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()


@contextmanager
def disk_full_errors(directory: Path, what: str, least: int) -> Iterator[None]:
    """Context for writes to `directory`, in which a full disk is a coded error.

    Args:
        what: names the file and its size in the error.
        least: bytes that must be free at the start.

    Raises:
        DiskFull: `least` bytes are not free, or no space is left; names what was free.
    """
    usage = shutil.disk_usage(directory)
    text = f"{what}, {megabytes(usage.free)} free in {directory}"
    if least > usage.free and usage.total:  # /proc has no blocks, and is not full
        raise DiskFull(text)
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(f"{text}: {error.strerror}") from error


def megabytes(size: int) -> str:
    """Human-readable size of so many bytes, as ``12.3 MB``."""
    return f"{size / 1e6:.1f} MB"


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
