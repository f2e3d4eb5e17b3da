"""A zstd stream read to its very end, in bounded memory."""

from __future__ import annotations

import io
import os
import tarfile
from typing import IO, cast

from typing_extensions import Buffer

MAX_WINDOW = 128 << 20
"""How many bytes a stream may ask its reader to remember: as many as `zstd --long` does."""
HEAD = 18
"""Bytes of the longest header of a frame."""

_PIECE = 1 << 20
_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # behind one byte of 0x50 to 0x5f; pzstd begins with such a frame
# So that it can be compressed: then its frame does not hold it as it is.
_END = b"here a whole zstd stream ends; " * 8


def is_zstd(head: bytes) -> bool:
    """Whether a file that begins with `head` is a zstd stream."""
    return head.startswith(_MAGIC) or (head[1:4] == _SKIPPABLE and head[0] >> 4 == 5)


class Reader(io.RawIOBase):
    """What `file` holds, forward only; `head` is its first `HEAD` bytes, which are not read yet.

    Raises:
        tarfile.ReadError: damaged, followed by something else, or a window over `MAX_WINDOW`.
    """

    def __init__(self, file: IO[bytes], head: bytes) -> None:
        import zstandard

        self._position = 0
        self._broken = zstandard.ZstdError
        # zstandard does not tell a stream that is cut short from a whole one. What follows a whole
        # one is decompressed, so this has to come out last.
        behind = io.BytesIO(zstandard.ZstdCompressor().compress(_END))
        if head.startswith(_MAGIC):
            try:
                window = zstandard.get_frame_parameters(head).window_size
            except zstandard.ZstdError as error:
                raise tarfile.ReadError(str(error)) from error
            if window > MAX_WINDOW:
                raise tarfile.ReadError(f"a zstd window of {window} bytes, over {MAX_WINDOW}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        joined = cast("IO[bytes]", _Joined(file, behind))
        self._stream = decompressor.stream_reader(joined, _PIECE, True)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """The next bytes, fewer than have room only at the end."""
        try:
            count: int = self._stream.readinto(buffer)
        except self._broken as error:
            raise tarfile.ReadError(str(error)) from error
        self._position += count
        return count

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """Read on to `position`, or to the end."""
        if whence != os.SEEK_SET or position < self._position:
            raise io.UnsupportedOperation("only forward")
        while self._position < position:
            if not self.read(min(_PIECE, position - self._position)):
                break
        return self._position

    def finish(self) -> None:
        """Read the rest.

        Raises:
            tarfile.ReadError: as while reading, or the stream is cut short.
        """
        last = b""
        while piece := self.read(_PIECE):
            last = (last + piece)[-len(_END) :]
        if last != _END:
            raise tarfile.ReadError("the zstd stream is cut short")


class _Joined:
    """Two files, one behind the other."""

    def __init__(self, first: IO[bytes], second: IO[bytes]) -> None:
        self._files = (first, second)

    def read(self, size: int) -> bytes:
        return self._files[0].read(size) or self._files[1].read(size)
