"""Work directory (COG_TRITON_WORK_DIR), checked before anything starts, and run directories in it.

The run directory of a process, ``run/PID``, has the names of its shared memory. Its owner holds a
lock on it. What the owner could not remove, as all was killed at once, the next start in the same
work directory does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cog_triton.errors import DiskFull, InvalidArgument
from cog_triton.system import reaper

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WHAT = "it holds unpacked engines, logs and what Triton runs"
SHM_NAMESPACE = "cog_triton_"
"""Begin of all our names in /dev/shm."""
_LOCK = "owner.lock"
_PREFIXES = "shm-prefixes"


def require_usable(work_dir: Path) -> None:
    """Make `work_dir`, and a file in it, which is removed again.

    Raises:
        InvalidArgument: its path or its file system does not allow that.
        DiskFull: no space is left.
    """
    try:
        str(work_dir).encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"COG_TRITON_WORK_DIR={str(work_dir)!r}: has characters that are not text in"
            " this locale: set LC_ALL=C.UTF-8, or another directory"
        ) from None
    with work_dir_errors(work_dir):
        work_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=work_dir) as file:
            file.write(b"x")
            file.flush()


@contextmanager
def work_dir_errors(work_dir: Path) -> Iterator[None]:
    """Context for writes below `work_dir`, in which errors of the file system have a code."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(
                f"COG_TRITON_WORK_DIR={str(work_dir)!r}: {error.strerror}: {_WHAT}; free some, or"
                " set it to a directory with more"
            ) from error
        raise InvalidArgument(
            f"COG_TRITON_WORK_DIR={str(work_dir)!r}: must be a directory that can be written:"
            f" {error.strerror}: {_WHAT}"
        ) from error


_own: dict[Path, int] = {}


def fresh_run_dir(work_dir: Path) -> Path:
    """A new run directory of this process, in place of an earlier one; removes those of dead ones.

    A process of another container, with a PID of its own kind, counts as alive by its lock.
    """
    runs = work_dir.resolve() / "run"
    runs.mkdir(parents=True, exist_ok=True)
    lock = _open_locked(runs / ".lock")
    try:
        for path in list(_own):
            if path.parent == runs:
                os.close(_own.pop(path))
        for path in runs.iterdir():
            if path.is_dir() and not _is_owned(path):
                _remove(path)
        run_dir = runs / str(os.getpid())
        if run_dir.exists():  # of another container's
            run_dir = runs / f"{os.getpid()}-{secrets.token_hex(3)}"
        run_dir.mkdir()
        _own[run_dir] = _open_locked(run_dir / _LOCK)
    finally:
        os.close(lock)
    return run_dir


def new_shm_prefix(run_dir: Path) -> str:
    """A new prefix for names in /dev/shm, recorded in `run_dir` before it is used."""
    prefix = f"{SHM_NAMESPACE}{run_dir.name}_{secrets.token_hex(3)}_"
    with (run_dir / _PREFIXES).open("a", encoding="utf-8") as file:
        file.write(f"{prefix}\n")
    return prefix


def _is_owned(run_dir: Path) -> bool:
    lock = run_dir / _LOCK
    try:
        os.close(_open_locked(lock, fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def _remove(run_dir: Path) -> None:
    with suppress(OSError, UnicodeDecodeError):
        for prefix in (run_dir / _PREFIXES).read_text("utf-8").split():
            if prefix.startswith(SHM_NAMESPACE) and len(prefix) > len(SHM_NAMESPACE):
                reaper.unlink_shm(prefix)
    shutil.rmtree(run_dir, ignore_errors=True)


def _open_locked(path: Path, flags: int = 0) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
