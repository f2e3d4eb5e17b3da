"""Streaming tar reader for untrusted tars: one pass, bounded memory, unsafe members refused."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Self

from backports import zstd

from cog_triton.errors import EngineCorrupt, InvalidArgument
from cog_triton.system.printable import shortened

MAX_MEMBERS = 1 << 16
_MAX_HEADER = 1 << 16
_MAX_READS = 16
"""Reads for the headers of one member: a global, an own and two long names take ten."""
_MAX_GLOBAL = 64
_MAX_NAME, _MAX_PART, _MAX_DEPTH = 1024, 255, 32
_RECORD = re.compile(rb"(\d{1,7}) ([^=\n]{1,255})=")
_DIGITS = re.compile(rb"\d{65}")
Form = Literal["tar", "gzip", "zstd"]
Stream = IO[bytes] | io.BufferedIOBase
Readable = io.RawIOBase | io.BufferedIOBase
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
END = bytes(2 * tarfile.BLOCKSIZE)
"""What follows the last member."""
MAX_WINDOW = 1 << _MAX_WINDOW_LOG
"""Most bytes that a zstd stream may ask its reader to remember: as many as `zstd --long` does."""


@dataclass(frozen=True, slots=True)
class Member:
    """File, link or directory of a tar, by its relative POSIX name without ``./``.

    `link` is a link's target, below the tar's root; `content` is a file's bytes, to be read before
    the next member is requested; they begin at byte `offset` of the tar without its compression.
    """

    name: str
    size: int = 0
    link: str | None = None
    content: io.RawIOBase | None = None
    offset: int = 0


def read(tar_path: Path) -> Iterator[Member]:
    """Members of a tar of any compression, in order; memory does not grow with their sizes.

    Raises:
        EngineCorrupt: no readable tar, cut short, without files, or an unsafe member: one that
            leaves the directory, has a name as `check_name` refuses it, is there twice, or is no
            file, directory or link that points down. Names the tar, or the member.
    """
    names = _Names()
    with (
        coded_errors(tar_path),
        tar_path.open("rb") as file,
        decompressing(file) as plain,
        tarfile.open(fileobj=(headers := _Headers(plain)), mode="r:", tarinfo=_Header) as tar,
    ):
        while (header := tar.next()) is not None:
            # tarfile keeps all of them, and their headers.
            tar.members.clear()  # type: ignore[attr-defined]
            headers.begin_member()
            if len(tar.pax_headers) > _MAX_GLOBAL:
                raise tarfile.HeaderError(f"more than {_MAX_GLOBAL} global keywords")
            name = names.add(header)
            if header.issym():
                yield Member(name, link=_link_target(header))
            elif header.isreg():
                content = _Content(tar_path, plain, name, header.size, header.offset_data)
                yield Member(name, header.size, content=content, offset=header.offset_data)
            elif name != ".":
                yield Member(name)
    if not names.files:
        raise EngineCorrupt(f"{tar_path}: has no files in it")


@contextmanager
def content_apart(tar_path: Path, member: Member) -> Iterator[io.RawIOBase]:
    """Content of a member of a tar without compression, to be read beside the others."""
    with coded_errors(tar_path):
        file = tar_path.open("rb", 0)
    with file:
        yield _Content(tar_path, file, member.name, member.size, member.offset)


@contextmanager
def coded_errors(tar_path: Path) -> Iterator[None]:
    """Context that turns errors of reading the tar at `tar_path` into EngineCorrupt."""
    try:
        yield
    except _UNREADABLE as error:
        raise EngineCorrupt(f"{tar_path}: not a whole, readable tar: {error}") from error
    except OSError as error:
        raise EngineCorrupt(f"{tar_path}: cannot be read: {error.strerror}") from error


# The last three are what tarfile lets through of numbers and texts that are none, or too large.
_UNREADABLE = (
    *(tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError),
    *(ValueError, OverflowError, RecursionError),
)


def check_name(name: str) -> None:
    """Raise EngineCorrupt for a name that no file system holds, or that no terminal shows."""
    if not name.isprintable():
        raise EngineCorrupt(f"member {shortened(name)} has control or unprintable characters")
    parts = name.split("/")
    if len(name.encode()) > _MAX_NAME or max(len(p.encode()) for p in parts) > _MAX_PART:
        raise EngineCorrupt(
            f"member {shortened(name)} has a name of more than {_MAX_NAME} bytes, or {_MAX_PART} of"
            " a directory or file"
        )
    if len(parts) > _MAX_DEPTH:
        raise EngineCorrupt(f"member {shortened(name)} is more than {_MAX_DEPTH} levels deep")


class _Header(tarfile.TarInfo):
    """Header that refuses what tarfile takes for the tar's end: a broken header, or none."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"at byte {tarfile_.offset}: {error}") from error

    def _proc_pax(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        """Have the records checked before tarfile searches them, which takes it quadratic time."""
        assert isinstance(tarfile_.fileobj, _Headers)
        tarfile_.fileobj.expects_pax = True
        return super()._proc_pax(tarfile_)  # type: ignore[misc,no-any-return]


class _Headers:
    """File object for tarfile alone, which reads long names whole, whatever size they claim.

    `_Content` reads the members past it, so all that is read here is headers. The bounds are here
    since tarfile's inner calls differ between the patch releases of Python. tarfile calls itself
    for each of the headers of a member, so they are counted.
    """

    def __init__(self, plain: io.BufferedIOBase) -> None:
        self._plain = plain
        self._reads = 0
        self.expects_pax = False
        self.seek, self.tell = plain.seek, plain.tell
        self.write, self.close = plain.write, plain.close

    def begin_member(self) -> None:
        """Expect the headers of the next member."""
        self._reads = 0

    def read(self, size: int) -> bytes:
        self._reads += 1
        if self._reads > _MAX_READS:
            raise tarfile.HeaderError("a member with too many headers")
        if size < 0:
            raise tarfile.HeaderError(f"a header of {size} bytes")
        if size > _MAX_HEADER:
            raise tarfile.HeaderError(f"a header of {size} bytes, over {_MAX_HEADER}")
        data = self._plain.read(size)
        if self.expects_pax:
            self.expects_pax = False
            _check_pax(data)
        return data


def _check_pax(data: bytes) -> None:
    """Refuse extended headers (POSIX pax) that are not whole records, or of a sparse file."""
    at = 0
    while at < len(data) and data[at]:
        record = _RECORD.match(data, at)
        end = at + int(record[1]) if record else at
        if record is None or end <= record.end() or data[end - 1 : end] != b"\n":
            raise tarfile.HeaderError(f"no extended header at byte {at} of one")
        if record[2].startswith(b"GNU.sparse"):
            raise tarfile.HeaderError("a sparse file")
        at = end
    if _DIGITS.search(data):
        raise tarfile.HeaderError("an extended header with a number of more than 64 digits")


class _Names:
    """Names seen so far: no two members share one, and none lies below a file or link."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.links: set[str] = set()
        self.directories: set[str] = {"."}

    def add(self, header: tarfile.TarInfo) -> str:
        """Record a member; returns its name, or refuses its kind or place."""
        if header.issparse() or not (header.isreg() or header.isdir() or header.issym()):
            raise EngineCorrupt(
                f"member {shortened(header.name)} is a hard link, device, pipe or sparse file"
            )
        check_name(header.name)
        if header.size < 0:
            raise EngineCorrupt(f"member {header.name!r} has {header.size} bytes")
        path = PurePosixPath(header.name)
        if path.is_absolute() or ".." in path.parts:
            raise EngineCorrupt(f"member {header.name!r} leaves the engine directory")
        parents = {str(parent) for parent in path.parents}
        if parents & self.files or parents & self.links:
            raise EngineCorrupt(f"member {header.name!r} lies behind a link or a file")
        name = str(path)
        taken = name in self.files or name in self.links
        if taken or (name in self.directories and not header.isdir()):
            raise EngineCorrupt(f"member {header.name!r} is there twice, or is also a directory")
        if len(self.files) + len(self.links) + len(self.directories) >= MAX_MEMBERS:
            raise EngineCorrupt(f"member {header.name!r} is one too many: over {MAX_MEMBERS}")
        self.directories |= parents
        kind = self.directories if header.isdir() else self.links if header.issym() else self.files
        kind.add(name)
        return name


def _link_target(header: tarfile.TarInfo) -> str:
    """Target of a link; only those that point down are safe in any chain."""
    check_name(header.linkname)
    aim = PurePosixPath(header.linkname)
    if not header.linkname or aim.is_absolute() or ".." in aim.parts:
        raise EngineCorrupt(f"member {header.name!r} links to {header.linkname!r}, outside")
    return header.linkname


class _Content(io.RawIOBase):
    """Content of a member, read without tarfile, which copies it twice."""

    def __init__(self, tar_path: Path, plain: Readable, name: str, size: int, offset: int) -> None:
        self._tar_path, self._plain, self._name = tar_path, plain, name
        self._size, self._offset = size, offset
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: self._size - self._done]
        if not view:
            return 0
        with coded_errors(self._tar_path):
            self._plain.seek(self._offset + self._done)
            count = self._plain.readinto(view) or 0
        if not count:
            raise EngineCorrupt(
                f"{self._tar_path}: member {self._name!r} ends after {self._done}"
                f" of {self._size} bytes"
            )
        self._done += count
        return count


def header(name: str, size: int) -> bytes:
    """Header of a file: time zero, owner 0, mode 0644; PAX for what ustar cannot hold."""
    info = tarfile.TarInfo(name)
    info.mode, info.size = 0o644, size
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> bytes:
    """What follows the `size` bytes of a file, up to the next block."""
    return bytes(-size % tarfile.BLOCKSIZE)


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
def decompressing(file: io.BufferedReader) -> Iterator[io.BufferedIOBase]:
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
