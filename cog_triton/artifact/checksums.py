"""Size and SHA-256 of what is copied, worked out beside the copying: hashlib lets the GIL go."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from cog_triton.artifact.engine_manifest import FileEntry

PIECE = 1 << 20
"""Bytes that are read at once, at the most."""
_BUFFERS = 6
Ring = deque[tuple[memoryview, Future[None]]]


class Readable(Protocol):
    """Any file that is open."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class Checksum:
    """Of one file, while it is read."""

    def __init__(self, thread: ThreadPoolExecutor, ring: Ring) -> None:
        self._thread, self._ring = thread, ring
        self._digest = hashlib.sha256()
        self._size = 0
        self._last: Future[None] | None = None

    def read(self, file: Readable, most: int = PIECE) -> memoryview:
        """The next bytes of `file`, none at its end; valid until this is called again.

        The buffers are the same all the time: fresh memory for each piece costs as much as hashing.
        """
        buffer, hashed = self._ring.popleft()
        hashed.result()
        piece = buffer[: file.readinto(buffer[:most]) or 0]
        self._size += len(piece)
        self._last = self._thread.submit(self._digest.update, piece)
        self._ring.append((buffer, self._last))
        return piece

    def entry(self) -> FileEntry:
        """Those of all that was read."""
        if self._last is not None:
            self._last.result()
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())


@contextmanager
def hashing() -> Iterator[Callable[[], Checksum]]:
    """Makes checksums, for one file after the other, in a thread that ends with this context."""
    with ThreadPoolExecutor(1, "sha256") as thread:
        ready: Future[None] = Future()
        ready.set_result(None)
        ring: Ring = deque((memoryview(bytearray(PIECE)), ready) for _ in range(_BUFFERS))
        yield partial(Checksum, thread, ring)
