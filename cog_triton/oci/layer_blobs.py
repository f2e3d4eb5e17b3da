"""Engine to push: its files, as spans of a directory's or of its tar, and layers made of them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import engine_manifest, engine_tar, seal, tar_members
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, MAX_TEXT, FileEntry, Manifest
from cog_triton.errors import EngineCorrupt
from cog_triton.oci.image_manifest import WHITEOUT, LayerFiles
from cog_triton.system.printable import printable

MAX_LAYERS = 120
"""Most layers of an engine: docker mounts 127, an overlay of a kernel before 6.5 some 128."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file on this machine, from `offset` on."""

    path: Path
    offset: int
    size: int

    def read(self) -> Iterator[bytes]:
        """The span's bytes; raises E1306 where the file has got shorter."""
        at = self.offset
        end = self.offset + self.size
        with self.path.open("rb", buffering=0) as file:
            file.seek(at)
            while at < end:
                chunk = file.read(min(_CHUNK, end - at))
                if not chunk:
                    raise EngineCorrupt(f"{self.path}: became shorter while it was read")
                yield chunk
                at += len(chunk)


Part = bytes | Span


class LayerBlob:
    """A layer as a tar of `files`, equal for equal names and contents.

    It is Cog's packing, which is every deterministic one's: sorted names, times zero, owners 0,
    modes 0644, PAX for what ustar cannot hold; uncompressed, so that a layer is its own diff.
    """

    def __init__(self, files: Mapping[str, Span]) -> None:
        self._files = dict(sorted(files.items()))
        self._parts: list[Part] = []
        for name, span in self._files.items():
            self._parts += [tar_members.header(name, span.size), span]
            self._parts.append(tar_members.padding(span.size))
        self._parts.append(tar_members.END)
        self.size = sum(map(_size, self._parts))
        """Bytes of the blob."""

    def read(self) -> Iterator[bytes]:
        """The blob's bytes, in chunks."""
        for part in self._parts:
            yield from [part] if isinstance(part, bytes) else part.read()

    def describe(self, progress: Callable[[int], None]) -> LayerFiles:
        """Digests of the blob and of each file, all of which is read once."""
        blob = hashlib.sha256()
        entries = {}
        names = iter(self._files)
        for part in self._parts:
            if isinstance(part, bytes):
                blob.update(part)
                continue
            content = hashlib.sha256()
            for chunk in part.read():
                blob.update(chunk)
                content.update(chunk)
                progress(len(chunk))
            entries[next(names)] = FileEntry(size=part.size, sha256=content.hexdigest())
        return LayerFiles(f"sha256:{blob.hexdigest()}", self.size, entries)


def layers_of(files: Mapping[str, Span]) -> list[LayerBlob]:
    """A layer for each file, by name; over `MAX_LAYERS` the smallest files share the last one.

    A seal, of hundreds of kernels, is one layer, so that a new one is all that is sent again.

    Raises:
        EngineCorrupt: a name that a layer cannot have.
    """
    seals: dict[str, list[str]] = {}
    others: list[str] = []
    for name in files:
        if any(part.startswith(WHITEOUT) for part in name.split("/")) or not name.isprintable():
            raise EngineCorrupt(f"{printable(name)}: no name for a file of a layer")
        owner = seal.seal_of(name)
        (others if owner is None else seals.setdefault(owner, [])).append(name)
    others.sort(key=lambda name: (-files[name].size, name))
    most = MAX_LAYERS - len(seals)
    alone = others if len(others) <= most else others[: most - 1]
    layers = [[name] for name in sorted(alone)]
    layers += [*(seals[owner] for owner in sorted(seals)), others[len(alone) :]]
    return [LayerBlob({name: files[name] for name in names}) for names in layers if names]


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.size


@dataclass(frozen=True)
class EngineFiles:
    """Files by name, and their manifest; None for an engine of an older builder."""

    files: Mapping[str, Span]
    manifest: Manifest | None
    left_out: tuple[str, ...] = ()


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
            text = member.content.read(MAX_TEXT + 1)
            manifest = engine_manifest.parse(text, f"{tar}: {MANIFEST_NAME}")
    return EngineFiles(files, manifest)
