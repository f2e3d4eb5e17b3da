"""Page cache: files that are read into it by a thread, before whoever needs them asks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cog_triton.system.host_memory import host_memory

_log = logging.getLogger(__name__)
_CHUNK = 32 << 20  # so that the thread asks for the GIL seldom
_PAGE = os.sysconf("SC_PAGE_SIZE")
ROOM = 4 << 30
"""Bytes of host memory that are left free."""


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Context in which `files` are read, one after the other; nothing where memory is short.

    What is cached already is passed over (preadv2(2), RWF_NOWAIT).
    """
    stop = threading.Event()
    size = sum(path.stat().st_size for path in files)
    if not size or host_memory().free < size + ROOM:
        yield
        return
    thread = threading.Thread(target=_read, args=(files, stop), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _read(files: Sequence[Path], stop: threading.Event) -> None:
    began, read = time.monotonic(), 0
    chunk = memoryview(bytearray(_CHUNK))
    try:
        for path in files:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                for offset in range(0, os.fstat(file.fileno()).st_size, _CHUNK):
                    if stop.is_set() or host_memory().free < ROOM:
                        return
                    if not _is_cached(file.fileno(), offset):
                        read += os.preadv(file.fileno(), [chunk], offset)
    except OSError as error:
        _log.warning("weights are not read ahead: %s", error)
    finally:
        seconds = time.monotonic() - began
        _log.info("read ahead: %.0f MB of weights in %.1f s", read / 1e6, seconds)


def _is_cached(file: int, offset: int) -> bool:
    """Whether the page at `offset` is in the page cache; False where that cannot be asked."""
    try:
        return os.preadv(file, [bytearray(_PAGE)], offset, os.RWF_NOWAIT) > 0
    except OSError:  # EAGAIN, or the file system has no such flag
        return False
