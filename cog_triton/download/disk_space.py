"""Disk checks for downloads: free space, and a lock for each target."""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cog_triton.download.transfer_progress import Echo, size_text
from cog_triton.errors import DiskFull, ModelUnavailable
from cog_triton.system import file_lock

RESERVE = 64 << 20
"""Bytes that stay free for everything else."""


def require(directory: Path, needed: int, name: str) -> None:
    """Raise DiskFull unless `needed` bytes more fit into `directory`, there or yet to be made."""
    free = _free(directory)
    if needed and needed + RESERVE > free:
        raise DiskFull(
            f"{name}: needs {size_text(needed)} more and {size_text(RESERVE)} in reserve, "
            f"{directory} has {size_text(free)} free"
        )


def same_file_system(one: Path, other: Path) -> bool:
    """Whether two directories, there or yet to be made, share their free space."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


@contextmanager
def coded_errors(path: Path, name: str) -> Iterator[None]:
    """Context that turns errors of the file system, while `name` is written to `path`, into codes.

    Raises:
        DiskFull: no space or quota is left.
        ModelUnavailable: `path` cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{name}: {path.parent} is full") from error
        raise ModelUnavailable(f"{name}: cannot be written to {path}: {error}") from error


@contextmanager
def writing(
    target: Path, name: str, echo: Echo, stop: threading.Event, doing: str = "fetching it"
) -> Iterator[None]:
    """Lock of `target` for one writer of this machine at a time; says so when it has to wait.

    `doing` is what the other one does. Errors of writing `name` there are as in `coded_errors`.

    Raises:
        BuildCancelled: `stop` was set while waiting.
    """
    path = target.with_name(f"{target.name}.lock")
    text = f"[download] {target.name}: another process is {doing}; waiting"
    with coded_errors(target, name), file_lock.waiting(path, lambda: echo(text), stop):
        yield


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A new directory beside `target`, which may be renamed to it; else it is removed.

    The caller holds the lock of `target`: leftovers of a killed process are removed.
    """
    for killed in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(killed, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _free(directory: Path) -> int:
    return shutil.disk_usage(_existing(directory)).free


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
