"""engine.tar: packed byte for byte the same every time, unpacked whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from cog_triton import engine_manifest
from cog_triton.engine_manifest import MANIFEST_NAME, FileEntry, Manifest
from cog_triton.errors import EngineCorrupt

_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Unpacked:
    """An unpacked engine: its manifest, None for a tar made without one, and what to tell users."""

    manifest: Manifest | None
    warnings: tuple[str, ...]


def pack(engine_dir: Path, tar_path: Path) -> Path:
    """Write `engine_dir`'s files to `tar_path`; equal files give equal bytes.

    Names are sorted, times zero, owners 0, modes 0644, directories left out. The tar appears
    under its name only when it is complete.
    """
    tar_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{tar_path.name}.", dir=tar_path.parent)
    temporary = Path(name)
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for inner, path in engine_manifest.files_of(engine_dir).items():
                member = tarfile.TarInfo(inner)
                member.size = path.stat().st_size
                member.mode = 0o644
                with path.open("rb") as content:
                    tar.addfile(member, content)
        temporary.chmod(0o644)
        temporary.replace(tar_path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return tar_path


def unpack(tar_path: Path, target_dir: Path) -> Unpacked:
    """Unpack a .tar or .tar.gz to `target_dir`, checking every file against its manifest.

    `target_dir` is replaced as a whole when everything was checked; on an error it is as before.

    Raises:
        EngineCorrupt: no readable tar, an unsafe member, or a file that is not as the manifest
            says; names the member.
    """
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}.", dir=target_dir.parent))
    try:
        entries = _extract_all(tar_path, fresh)
        manifest = engine_manifest.load(fresh)
        if manifest is not None:
            _compare(manifest, entries)
        fresh.chmod(0o755)
        _swap_in(fresh, target_dir)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if manifest is not None:
        return Unpacked(manifest, ())
    text = f"{tar_path.name} has no {MANIFEST_NAME}: what it was built for cannot be checked"
    return Unpacked(None, (text,))


def _extract_all(tar_path: Path, root: Path) -> dict[str, FileEntry]:
    try:
        file = tar_path.open("rb")
    except OSError as error:
        raise EngineCorrupt(f"{tar_path}: cannot be read: {error.strerror}") from error
    extraction = _Extraction(root)
    with file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        try:
            plain = gzip.GzipFile(fileobj=file) if packed else file
            with tarfile.open(fileobj=plain, mode="r:", tarinfo=_Member) as tar:
                for member in tar:
                    extraction.add(tar, member)
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise EngineCorrupt(f"{tar_path}: not a whole, readable tar: {error}") from error
    if not extraction.entries:
        raise EngineCorrupt(f"{tar_path}: has no files in it")
    return extraction.entries


class _Member(tarfile.TarInfo):
    """tarfile takes a broken header, or none, for the end of the tar; only zeros are."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"at byte {tarfile_.offset}: {error}") from error


class _Extraction:
    """Members written below `root`; `entries` says what was written, by member name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[str, FileEntry] = {}
        self._links: set[str] = set()

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = self._safe_name(member)
        if name == ".":
            return
        target = self.root / name
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            return
        if os.path.lexists(target):
            raise EngineCorrupt(f"member {member.name!r} is there twice, or is also a directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        if member.issym():
            self._check_link(member)
            target.symlink_to(member.linkname)
            self._links.add(name)
        elif member.isreg():
            content = tar.extractfile(member)
            assert content is not None
            self.entries[name] = _write(content, target, member)
        else:
            raise EngineCorrupt(f"member {member.name!r} is a hard link, device or pipe")

    def _safe_name(self, member: tarfile.TarInfo) -> str:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\0" in member.name:
            raise EngineCorrupt(f"member {member.name!r} leaves the engine directory")
        for parent in path.parents:
            if str(parent) in self._links or str(parent) in self.entries:
                raise EngineCorrupt(f"member {member.name!r} lies behind a link or a file")
        return str(path)

    def _check_link(self, member: tarfile.TarInfo) -> None:
        """Only links that point down: no chain of those can leave the directory."""
        aim = PurePosixPath(member.linkname)
        if aim.is_absolute() or ".." in aim.parts:
            raise EngineCorrupt(f"member {member.name!r} links to {member.linkname!r}, outside")


def _write(content: IO[bytes], target: Path, member: tarfile.TarInfo) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as file:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
    if size != member.size:
        raise EngineCorrupt(f"member {member.name!r} ends after {size} of {member.size} bytes")
    return FileEntry(size=size, sha256=digest.hexdigest())


def _compare(manifest: Manifest, entries: dict[str, FileEntry]) -> None:
    for name in sorted(entries.keys() - manifest.files.keys() - {MANIFEST_NAME}):
        raise EngineCorrupt(f"{name} is in the tar but not in its manifest")
    for name, entry in manifest.files.items():
        if name not in entries:
            raise EngineCorrupt(f"{name} is in the manifest but not in the tar")
        engine_manifest.check_entry(name, entry, entries[name].size, entries[name].sha256)


def _swap_in(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "engine")
    fresh.rename(target)
    shutil.rmtree(old)
