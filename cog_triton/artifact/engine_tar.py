"""engine.tar: reproducible packing, and atomic unpacking verified by the manifest."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cog_triton.artifact import engine_manifest, tar_members
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, File, FileEntry, Manifest
from cog_triton.artifact.tar_members import Readable
from cog_triton.errors import BuildStepFailed, EngineCorrupt
from cog_triton.system import atomic_write
from cog_triton.system.printable import printable

Members = Mapping[str, Path | bytes]
"""Members of a tar by name: files, or contents that are in no file."""
Progress = Callable[[int], None]
"""Callback with the number of further bytes packed."""
PIECE = 1 << 20
"""Most bytes of one read."""
_BUFFERS = 6
_APART = 64 << 20
"""Bytes from which a file is copied beside others: below, a thread costs more than it saves."""
_COPIERS = 4
Ring = deque[tuple[memoryview, Future[None]]]


def pack(
    members: Members,
    tar_path: Path,
    describe: Callable[[dict[str, FileEntry]], Manifest],
    progress: Progress = lambda _: None,
) -> Path:
    """Pack `members` and then their manifest to `tar_path`; equal members give equal bytes.

    Each file is read once, and hashed as it is written. Names are sorted, times zero, owners 0,
    modes 0644. The write is atomic.

    Args:
        tar_path: its suffix selects the compression, see `tar_members.SUFFIXES`.
        describe: makes the manifest of the files written; it becomes the last member.

    Raises:
        InvalidArgument: another suffix.
        EngineCorrupt: a name as `tar_members.check_name` refuses it.
        DiskFull: no space; an existing tar stays, as after any error.
        BuildStepFailed: a file changed while it was packed.
    """
    form = tar_members.by_name(tar_path)
    for name in members:
        tar_members.check_name(name)
    total = sum(map(size_of, members.values()))
    entries: dict[str, FileEntry] = {}
    with (
        atomic_write.writing(tar_path, total, at_most=form != "tar") as file,
        tar_members.compressing(file, form) as stream,
        hashing() as checksum,
    ):
        for name, source in sorted(members.items()):
            entries[name] = _add(stream, name, source, checksum(), progress)
        text = describe(entries).to_json().encode()
        _add(stream, MANIFEST_NAME, text, checksum(), lambda _: None)
        stream.write(tar_members.END)
        stream.write(bytes(-stream.tell() % tarfile.RECORDSIZE))
    return tar_path


def size_of(source: Path | bytes) -> int:
    """Size of a member in bytes."""
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _add(
    stream: tar_members.Stream,
    name: str,
    source: Path | bytes,
    checksum: Checksum,
    progress: Progress,
) -> FileEntry:
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        size = left = file.seek(0, os.SEEK_END)
        file.seek(0)
        stream.write(tar_members.header(name, size))
        while left:
            piece = checksum.read(file, min(PIECE, left))
            if not piece:
                raise BuildStepFailed(f"{name} became shorter while it was packed")
            stream.write(piece)
            left -= len(piece)
            progress(len(piece))
        if file.read(1):
            raise BuildStepFailed(f"{name} grew while it was packed")
        stream.write(tar_members.padding(size))
    return checksum.entry()


def unpack(tar_path: Path, target_dir: Path) -> Manifest | None:
    """Unpack a tar of any form to `target_dir`, checking every file against its manifest.

    `target_dir` is replaced atomically once everything is verified; an error leaves it unchanged.
    Returns the manifest, None if the tar has none.

    Raises:
        EngineCorrupt: no readable tar, an unsafe member, or a file that differs from the
            manifest; names the member.
        DiskFull: no space.
    """
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    with tar_members.coded_errors(tar_path):
        size, form = tar_path.stat().st_size, tar_members.by_content(tar_path)
    plain = form == "tar"
    least = "" if plain else f"more than its {form} of "
    what = f"{tar_path}: needs {least}{atomic_write.megabytes(size)}"
    with atomic_write.disk_full_errors(target_dir.parent, what, size if plain else 0):
        return _unpack(tar_path, target_dir)


def _unpack(tar_path: Path, target_dir: Path) -> Manifest | None:
    fresh = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}.", dir=target_dir.parent))
    try:
        entries = extract(tar_path, fresh)
        manifest = engine_manifest.load(fresh)
        if manifest is not None:
            for difference in differences(manifest, entries):
                raise EngineCorrupt(difference)
        fresh.chmod(0o755)
        _swap_in(fresh, target_dir)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return manifest


def extract(tar_path: Path, root: Path, *, links: bool = True) -> dict[str, FileEntry]:
    """Extract a tar of any form into the directory `root`; returns its files as they were read.

    Large files of a tar without compression are copied and hashed side by side, as one core
    hashes some 1.5 GB a second.

    Raises:
        EngineCorrupt: no readable tar, or an unsafe member; without `links`, also a link.
    """
    entries: dict[str, FileEntry] = {}
    copies: dict[str, Future[FileEntry]] = {}
    ended = threading.Event()
    is_plain = tar_members.by_content(tar_path) == "tar"
    copiers = min(_COPIERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(copiers, "copy") as pool, hashing() as checksum:
        try:
            for member in tar_members.read(tar_path):
                target = root / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                if member.content is not None and is_plain and member.size >= _APART:
                    copies[member.name] = pool.submit(_copy, tar_path, member, target, ended)
                elif member.content is not None:
                    entries[member.name] = _write(member.content, target, checksum(), ended)
                elif member.link is not None:
                    if not links:
                        raise EngineCorrupt(f"member {member.name!r} is a link")
                    target.symlink_to(member.link)
                else:
                    target.mkdir(exist_ok=True)
            return entries | {name: copied.result() for name, copied in copies.items()}
        finally:
            ended.set()


def _write(content: Readable, target: Path, sums: Checksum, ended: threading.Event) -> FileEntry:
    with target.open("xb") as file:
        while not ended.is_set() and (piece := sums.read(content)):
            file.write(piece)
    return sums.entry()


def _copy(
    tar_path: Path, member: tar_members.Member, target: Path, ended: threading.Event
) -> FileEntry:
    with hashing() as checksum, tar_members.content_apart(tar_path, member) as content:
        return _write(content, target, checksum(), ended)


def differences(manifest: Manifest, held: Mapping[str, FileEntry | File]) -> list[str]:
    """Describe each difference between the files of a tar and its manifest, naming the file."""
    extra = engine_manifest.unlisted(manifest, held)
    found = [f"{printable(name)} is in the tar but not in its manifest" for name in extra]
    return found + engine_manifest.differences(manifest, held)


def _swap_in(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "engine")
    fresh.rename(target)
    shutil.rmtree(old)


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
