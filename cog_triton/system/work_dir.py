"""Work directory (COG_TRITON_WORK_DIR): checked before anything starts."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cog_triton.errors import DiskFull, InvalidArgument

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WHAT = "it holds unpacked engines, logs and what Triton runs"


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
