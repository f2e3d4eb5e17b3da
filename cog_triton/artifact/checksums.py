"""SHA-256 and size of files while they are copied, hashed in a thread without the GIL."""

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
"""Most bytes of one read."""
_BUFFERS = 6
Ring = deque[tuple[memoryview, Future[None]]]


class Readable(Protocol):
    """An open file."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class Checksum:
    """Running size and SHA-256 of one file that is read through it."""

    def __init__(self, thread: ThreadPoolExecutor, ring: Ring) -> None:
        self._thread, self._ring = thread, ring
        self._digest = hashlib.sha256()
        self._size = 0
        self._last: Future[None] | None = None

    def read(self, file: Readable, most: int = PIECE) -> memoryview:
        """Next bytes of `file`, none at its end; valid until the next call.

        Buffers are reused: fresh memory for each piece costs as much as hashing.
        """
        buffer, hashed = self._ring.popleft()
        hashed.result()
        piece = buffer[: file.readinto(buffer[:most]) or 0]
        self._size += len(piece)
        self._last = self._thread.submit(self._digest.update, piece)
        self._ring.append((buffer, self._last))
        return piece

    def entry(self) -> FileEntry:
        """Size and SHA-256 of all that was read."""
        if self._last is not None:
            self._last.result()
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())


@contextmanager
def hashing() -> Iterator[Callable[[], Checksum]]:
    """Context with a hashing thread; yields the factory of checksums, one file after the other."""
    with ThreadPoolExecutor(1, "sha256") as thread:
        ready: Future[None] = Future()
        ready.set_result(None)
        ring: Ring = deque((memoryview(bytearray(PIECE)), ready) for _ in range(_BUFFERS))
        yield partial(Checksum, thread, ring)
