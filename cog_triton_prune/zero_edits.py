"""Edits that zero bytes in place: sizes and addresses stay, so nothing is relinked."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass

Bytes = bytes | bytearray | mmap.mmap
_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)


@dataclass(frozen=True)
class Edit:
    """Replacement of bytes `start` to `end` by those of `kept`, in order, then zeros.

    `kept` are ranges within; `length_at` is where to write their total size (u64), if anywhere.
    """

    start: int
    end: int
    kept: tuple[tuple[int, int], ...] = ()
    length_at: int | None = None

    @property
    def kept_size(self) -> int:
        """Bytes that stay."""
        return sum(end - start for start, end in self.kept)

    @property
    def freed(self) -> int:
        """Bytes that become zeros."""
        return self.end - self.start - self.kept_size


def apply(buffer: bytearray | mmap.mmap, edits: Iterable[Edit]) -> None:
    """Apply `edits` to the buffer that they were planned for."""
    with memoryview(buffer) as view:
        for edit in edits:
            to = edit.start
            for start, end in edit.kept:
                if start != to:
                    view[to : to + end - start] = view[start:end]
                to += end - start
            for at in range(to, edit.end, _CHUNK):
                size = min(_CHUNK, edit.end - at)
                view[at : at + size] = _ZEROS[:size]
            if edit.length_at is not None:
                struct.pack_into("<Q", view, edit.length_at, edit.kept_size)


def is_zero(buffer: Bytes, start: int, end: int) -> bool:
    """Whether bytes `start` to `end` are all zero."""
    for at in range(start, end, _CHUNK):
        size = min(_CHUNK, end - at)
        if buffer[at : at + size] != _ZEROS[:size]:
            return False
    return True
