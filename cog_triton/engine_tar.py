"""engine.tar: packed byte for byte the same every time, unpacked whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cog_triton import engine_manifest, tar_members
from cog_triton.engine_manifest import MANIFEST_NAME, FileEntry, Manifest
from cog_triton.errors import EngineCorrupt


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
            for difference in differences(manifest, entries):
                raise EngineCorrupt(difference)
        fresh.chmod(0o755)
        _swap_in(fresh, target_dir)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if manifest is not None:
        return Unpacked(manifest, ())
    text = f"{tar_path.name} has no {MANIFEST_NAME}: what it was built for cannot be checked"
    return Unpacked(None, (text,))


def _extract_all(tar_path: Path, root: Path) -> dict[str, FileEntry]:
    entries = {}
    for member in tar_members.read(tar_path):
        target = root / member.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if member.content is not None:
            entries[member.name] = _write(member.content, target)
        elif member.link is not None:
            target.symlink_to(member.link)
        else:
            target.mkdir(exist_ok=True)
    return entries


def _write(content: Iterator[bytes], target: Path) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as file:
        for chunk in content:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
    return FileEntry(size=size, sha256=digest.hexdigest())


def differences(manifest: Manifest, held: Mapping[str, FileEntry]) -> list[str]:
    """Each way in which the files of a tar are not what its manifest says, naming the file."""
    extra = engine_manifest.unnamed(manifest, held)
    found = [f"{name} is in the tar but not in its manifest" for name in extra]
    return found + engine_manifest.differences(manifest, held)


def _swap_in(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "engine")
    fresh.rename(target)
    shutil.rmtree(old)
