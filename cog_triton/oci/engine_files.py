"""Files of an engine to push, as spans of a directory's files or of its tar."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import engine_manifest, engine_tar, tar_members
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, FileEntry, Manifest
from cog_triton.errors import EngineCorrupt
from cog_triton.oci.layer_blobs import Span
from cog_triton.system.printable import printable

_MAX_MANIFEST = 64 << 20


@dataclass(frozen=True)
class EngineFiles:
    """Files by name, and their manifest; None for an engine of an older builder."""

    files: Mapping[str, Span]
    manifest: Manifest | None
    left_out: tuple[str, ...] = ()

    def verify(self, entries: Mapping[str, FileEntry]) -> None:
        """Raise EngineCorrupt unless the files, as they were read, are the manifest's."""
        if self.manifest is not None:
            for difference in engine_tar.differences(self.manifest, entries):
                raise EngineCorrupt(difference)


@contextmanager
def opened(engine: Path, scratch: Path) -> Iterator[EngineFiles]:
    """Files of an engine directory, or of an engine.tar, which is read where it lies.

    A compressed tar is unpacked into `scratch` meanwhile.

    Raises:
        EngineCorrupt: no readable tar, an unsafe member, a link in it, or a broken manifest.
        DiskFull: no space to unpack.
    """
    if engine.is_dir():
        yield _of_directory(engine)
        return
    with tar_members.coded_errors(engine):
        form = tar_members.by_content(engine)
    if form == "tar":
        yield _of_tar(engine)
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".push.", dir=scratch) as directory:
        engine_tar.unpack(engine, Path(directory) / "engine")
        yield _of_directory(Path(directory) / "engine")


def _of_directory(directory: Path) -> EngineFiles:
    manifest = engine_manifest.load(directory)
    files = engine_manifest.files_of(directory)
    extra = engine_manifest.unlisted(manifest, files) if manifest else []
    kept = {
        name: Span(path, 0, path.stat().st_size)
        for name, path in files.items()
        if name not in extra
    }
    return EngineFiles(kept, manifest, tuple(extra))


def _of_tar(tar: Path) -> EngineFiles:
    files, manifest = {}, None
    for member in tar_members.read(tar):
        if member.link is not None:
            raise EngineCorrupt(
                f"{tar}: {printable(member.name)} is a link, which a layer of its own cannot hold:"
                " push the unpacked directory, whose links are followed"
            )
        if member.content is None:
            continue
        files[member.name] = Span(tar, member.offset, member.size)
        if member.name == MANIFEST_NAME:
            if member.size > _MAX_MANIFEST:
                raise EngineCorrupt(f"{tar}: its {MANIFEST_NAME} has {member.size} bytes")
            manifest = engine_manifest.parse(member.content.read(), f"{tar}: {MANIFEST_NAME}")
    return EngineFiles(files, manifest)
