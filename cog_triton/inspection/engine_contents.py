"""Engine contents: size and SHA-256 of every file in a tar or directory, without unpacking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cog_triton.artifact import engine_manifest, tar_members
from cog_triton.artifact.engine_config import CONFIG_NAME
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, MAX_TEXT, FileEntry
from cog_triton.artifact.engine_tar import Readable, hashing
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.oci.reference import Reference
from cog_triton.system.printable import printable


@dataclass(frozen=True, slots=True)
class EngineContents:
    """Files by name with size (bytes) and SHA-256, and the bytes of manifest and config.json.

    In a registry only the latter were read; all other `files` are as the manifest says.
    """

    path: Path | Reference
    kind: Literal["tar", "directory", "registry"]
    compression: Literal["gzip", "zstd"] | None
    files: dict[str, FileEntry]
    texts: dict[str, bytes]

    @property
    def digest(self) -> str | None:
        """Digest in its registry; None for what is in none."""
        return self.path.digest if isinstance(self.path, Reference) else None

    def was_read(self, name: str) -> bool:
        """Whether the file's size and checksum are of its bytes, and not of the manifest."""
        return self.kind != "registry" or name in self.texts


def read(path: Path) -> EngineContents:
    """Read a tar or an engine directory once, front to back; nothing is written.

    Raises:
        ModelUnavailable: there is nothing at `path`.
        EngineCorrupt: it is neither a readable, safe tar nor a directory with an engine.
    """
    if path.is_dir():
        return EngineContents(path, "directory", None, *_collect(path, _directory_files(path)))
    if path.is_file():
        with tar_members.coded_errors(path):
            form = tar_members.by_content(path)
        held = _collect(path, _tar_files(path))
        return EngineContents(path, "tar", None if form == "tar" else form, *held)
    if path.exists():
        raise EngineCorrupt(f"{path}: must be a tar or a directory, is neither")
    raise ModelUnavailable(f"{path}: no such file or directory")


def _tar_files(path: Path) -> Iterator[tuple[str, Readable]]:
    for member in tar_members.read(path):
        if member.content is not None:
            yield member.name, member.content


def _directory_files(path: Path) -> Iterator[tuple[str, Readable]]:
    """The files of an engine directory; others, as a home directory, are refused unread."""
    try:
        held = sorted(child.name for child in path.iterdir())
        if not {CONFIG_NAME, MANIFEST_NAME} & set(held):
            raise EngineCorrupt(no_engine(path, held))
        for name, file in engine_manifest.files_of(path).items():
            with file.open("rb") as opened:
                yield name, opened
    except OSError as error:
        raise EngineCorrupt(f"{error.filename}: cannot be read: {error.strerror}") from error


def no_engine(path: Path | Reference, held: Iterable[str]) -> str:
    """Error text: `path` has neither manifest nor config.json, but these files."""
    names = [printable(name) for name in held]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{path}: not an engine: neither {MANIFEST_NAME} nor {CONFIG_NAME} at its top;"
        f" it holds {shown or 'nothing'}"
    )


def _collect(
    path: Path, found: Iterable[tuple[str, Readable]]
) -> tuple[dict[str, FileEntry], dict[str, bytes]]:
    files: dict[str, FileEntry] = {}
    texts: dict[str, bytes] = {}
    with hashing() as checksum:
        for name, content in found:
            sums = checksum()
            kept = bytearray() if name in (CONFIG_NAME, MANIFEST_NAME) else None
            try:
                while piece := sums.read(content):
                    if kept is not None:
                        kept += piece
                        if len(kept) > MAX_TEXT:
                            raise EngineCorrupt(f"{path}: {name} has over {MAX_TEXT} bytes")
            except OSError as error:
                raise EngineCorrupt(
                    f"{path}: {printable(name)}: cannot be read: {error.strerror}"
                ) from error
            files[name] = sums.entry()
            if kept is not None:
                texts[name] = bytes(kept)
    return dict(sorted(files.items())), texts
