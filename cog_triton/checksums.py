"""Size and SHA-256 of what is copied, worked out beside the copying: hashlib lets the GIL go."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from cog_triton.engine_manifest import FileEntry

_MAX_WAITING = 4  # pieces, so that a slow processor does not fill the memory


class Checksum:
    """Of one file, fed in pieces."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._digest = hashlib.sha256()
        self._size = 0
        self._waiting: deque[Future[None]] = deque()

    def update(self, piece: bytes) -> None:
        """Add `piece`, which must not change any more."""
        self._size += len(piece)
        self._waiting.append(self._pool.submit(self._digest.update, piece))
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft().result()

    def entry(self) -> FileEntry:
        """Those of all pieces."""
        while self._waiting:
            self._waiting.popleft().result()
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())


@contextmanager
def hashing() -> Iterator[Callable[[], Checksum]]:
    """Makes checksums, one file after the other, in one thread that ends with this context."""
    with ThreadPoolExecutor(1, "sha256") as pool:
        yield partial(Checksum, pool)
