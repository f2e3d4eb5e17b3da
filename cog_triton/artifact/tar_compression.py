"""Compression of an engine.tar: written by the name's suffix, read by magic bytes."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, Protocol

from backports import zstd

from cog_triton.errors import InvalidArgument

Form = Literal["tar", "gzip", "zstd"]
SUFFIXES: dict[str, Form] = {".tar": "tar", ".tar.gz": "gzip", ".tgz": "gzip", ".tar.zst": "zstd"}

_PIECE = 1 << 20
_MAX_PIECES_AFTER = 64
_GZIP = b"\x1f\x8b"
_GZIP_LEVEL = 1  # weights hardly compress: a higher level costs time and gains nothing
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # behind one byte of 0x50 to 0x5f; pzstd begins with such a frame
_ZSTD_LEVEL = 3
_HEAD = 6  # bytes: the magic ones and, of zstd, the window's size
_MAX_THREADS = 4  # zstd's; each holds some 20 MB
_MAX_WINDOW_LOG = 27
MAX_WINDOW = 1 << _MAX_WINDOW_LOG
"""Most bytes that a zstd stream may ask its reader to remember: as many as `zstd --long` does."""


class Stream(Protocol):
    """File interface that tarfile needs."""

    def read(self, size: int, /) -> bytes: ...
    def write(self, data: bytes, /) -> object: ...
    def tell(self) -> int: ...
    def seek(self, position: int, /) -> object: ...
    def close(self) -> object: ...


class Source(Stream, Protocol):
    """Readable `Stream`, which also fills a buffer."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def by_name(path: Path) -> Form:
    """Form by the suffix of `path`.

    Raises:
        InvalidArgument: another suffix.
    """
    for suffix, form in SUFFIXES.items():
        if path.name.endswith(suffix):
            return form
    raise InvalidArgument(
        f"output {str(path)!r}: its name must end in one of {', '.join(SUFFIXES)}"
    )


def by_content(path: Path) -> Form:
    """Form by the first bytes of the file at `path`; plain if they are of no known compression."""
    with path.open("rb") as file:
        return _form(file.read(_HEAD))


def _form(head: bytes) -> Form:
    if head.startswith(_GZIP):
        return "gzip"
    skippable = head[1:4] == _ZSTD_SKIPPABLE and head[0] >> 4 == 5
    return "zstd" if skippable or head.startswith(_ZSTD) else "tar"


@contextmanager
def compressing(file: IO[bytes], form: Form) -> Iterator[Stream]:
    """A stream that writes to `file` in `form`, equal bytes for equal input on any machine."""
    if form == "tar":
        yield file
    elif form == "gzip":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
            yield packed
    else:
        # Any number of threads gives the same bytes; 0, zstd's default, gives others.
        options: dict[int, int] = {
            zstd.CompressionParameter.compression_level: _ZSTD_LEVEL,
            zstd.CompressionParameter.checksum_flag: 1,
            zstd.CompressionParameter.nb_workers: min(_MAX_THREADS, len(os.sched_getaffinity(0))),
        }
        with zstd.ZstdFile(file, "w", options=options) as stream:
            yield stream


@contextmanager
def decompressing(file: io.BufferedReader) -> Iterator[Source]:
    """The tar in `file`, of any form, as a stream to be read forward.

    Raises:
        tarfile.ReadError, EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError: while it is
            read, or on leaving, which reads the rest: the compression is cut short, damaged,
            followed by something else or, of zstd, needs a window over `MAX_WINDOW`.
    """
    head = file.read(_HEAD)
    file.seek(0)
    form = _form(head)
    if form == "tar":
        yield file
        return
    with gzip.GzipFile(fileobj=file) if form == "gzip" else _zstd_file(file, head) as unpacked:
        yield unpacked
        for _ in range(_MAX_PIECES_AFTER):
            if not unpacked.read(_PIECE):
                return  # the checksum comes last
        raise tarfile.ReadError(f"goes on for {_MAX_PIECES_AFTER} MiB after the tar's end")


def _zstd_file(file: io.BufferedReader, head: bytes) -> zstd.ZstdFile:
    window = _window(head) if head.startswith(_ZSTD) else 0
    if window > MAX_WINDOW:
        raise tarfile.ReadError(f"a zstd window of {window} bytes, over {MAX_WINDOW}")
    limit: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    return zstd.ZstdFile(file, options=limit)


def _window(head: bytes) -> int:
    """Window size in bytes of the zstd frame that begins with `head`; 0 where it has none.

    See RFC 8878, 3.1.1.1.2. The library refuses a large one without naming its size.
    """
    if len(head) < _HEAD or head[4] & 0x20:  # a single segment's window is its content
        return 0
    base = 1 << (10 + (head[5] >> 3))
    return base + (base >> 3) * (head[5] & 7)
