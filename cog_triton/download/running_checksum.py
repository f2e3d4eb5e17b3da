"""SHA-256 of a download while it comes: of its pieces in order, as they are finished."""

from __future__ import annotations

import hashlib
import threading
from types import TracebackType
from typing import Self

from cog_triton.download.partial_file import PartialFile

_CHUNK = 1 << 20
_WAIT_S = 0.2


class RunningChecksum:
    """Checksum of `partial` by a thread of its own, within ``with``.

    It is as old as the file's `generation`: where that begins anew, so does this.
    """

    def __init__(self, partial: PartialFile) -> None:
        self._partial = partial
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._begin()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def hexdigest(self) -> str:
        """Checksum of the whole file, once all of it is there."""
        self._stop.set()
        self._thread.join()
        if self._generation != self._partial.generation:
            self._begin()
        self._read(None)
        return self._digest.hexdigest()

    def _begin(self) -> None:
        self._generation = self._partial.generation
        self._digest = hashlib.sha256()
        self._at = self._number = 0

    def _follow(self) -> None:
        while not self._stop.is_set():
            if self._generation != self._partial.generation:
                self._begin()
            end = self._partial.finished_end(self._number)
            if end is None:
                self._partial.changed.wait(_WAIT_S)
                self._partial.changed.clear()
                continue
            try:
                self._read(end)
            except OSError:  # it was removed, for another generation
                continue
            self._number += 1

    def _read(self, end: int | None) -> None:
        """Hash up to byte `end`, or all that is left."""
        with self._partial.path.open("rb") as file:
            file.seek(self._at)
            while end is None or self._at < end:
                chunk = file.read(_CHUNK if end is None else min(_CHUNK, end - self._at))
                if not chunk:
                    break
                self._digest.update(chunk)
                self._at += len(chunk)
