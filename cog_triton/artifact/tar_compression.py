"""The forms of an engine.tar: a name's suffix says which to write, magic bytes which to read."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, Protocol

from cog_triton.artifact import unzstd
from cog_triton.errors import InvalidArgument

Form = Literal["tar", "gzip", "zstd"]
SUFFIXES: dict[str, Form] = {".tar": "tar", ".tar.gz": "gzip", ".tgz": "gzip", ".tar.zst": "zstd"}

_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_GZIP_LEVEL = 1  # weights hardly compress: a higher level costs time and gains nothing
_ZSTD_LEVEL = 3
_MAX_THREADS = 4  # zstd's; each holds some 20 MB


class Stream(Protocol):
    """What tarfile wants of a file."""

    def read(self, size: int, /) -> bytes: ...
    def write(self, data: bytes, /) -> object: ...
    def tell(self) -> int: ...
    def seek(self, position: int, /) -> object: ...
    def close(self) -> object: ...


class Source(Stream, Protocol):
    """And what we want of one to read."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def by_name(path: Path) -> Form:
    """The form that `path`'s suffix asks for.

    Raises:
        InvalidArgument: it asks for none.
    """
    for suffix, form in SUFFIXES.items():
        if path.name.endswith(suffix):
            return form
    raise InvalidArgument(
        f"output {str(path)!r}: its name must end in one of {', '.join(SUFFIXES)}"
    )


def by_content(path: Path) -> Form:
    """The form of the file at `path` by its first bytes; what is no tar at all counts as plain."""
    with path.open("rb") as file:
        return _form(file.read(unzstd.HEAD))


def _form(head: bytes) -> Form:
    if head.startswith(_GZIP):
        return "gzip"
    return "zstd" if unzstd.is_zstd(head) else "tar"


@contextmanager
def compressing(file: IO[bytes], form: Form) -> Iterator[Stream]:
    """A stream that writes to `file` in `form`, equal bytes for equal input on any machine."""
    if form == "tar":
        yield file
    elif form == "gzip":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
            yield packed
    else:
        import zstandard

        # Any number of threads gives the same bytes; 0, zstandard's default, gives others.
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        compressor = zstandard.ZstdCompressor(_ZSTD_LEVEL, threads=threads, write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as stream:
            yield stream


@contextmanager
def decompressing(file: io.BufferedReader) -> Iterator[Source]:
    """The tar in `file`, whatever its form, to be read forward.

    Raises:
        tarfile.ReadError, EOFError, zlib.error, gzip.BadGzipFile: while it is read, or on leaving,
            which reads the rest: the compression is cut short, damaged or followed by something
            else.
    """
    head = file.read(unzstd.HEAD)
    file.seek(0)
    form = _form(head)
    if form == "tar":
        yield file
    elif form == "gzip":
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked
            while unpacked.read(_PIECE):
                pass  # the checksum comes last
    else:
        stream = unzstd.Reader(file, head)
        yield stream
        stream.finish()
