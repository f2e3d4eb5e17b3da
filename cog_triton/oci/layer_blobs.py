"""Layers of an engine to push: tars made as they are read, of spans of its files."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact.engine_manifest import FileEntry
from cog_triton.errors import EngineCorrupt
from cog_triton.oci.image_manifest import LayerFiles
from cog_triton.system.printable import printable

MAX_LAYERS = 120
"""Most layers of an engine: docker mounts 127, an overlay of a kernel before 6.5 some 128."""
_CHUNK = 1 << 20
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_WHITEOUT = ".wh."


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file on this machine, from `offset` on."""

    path: Path
    offset: int
    size: int

    def read(self, start: int) -> Iterator[bytes]:
        """The bytes from `start` of the span on; raises E1306 where the file has got shorter."""
        at = self.offset + start
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
            self._parts += [_header(name, span.size), span, bytes(-span.size % _BLOCK)]
        self._parts.append(_END)
        self.size = sum(map(_size, self._parts))
        """Bytes of the blob."""

    def read(self, start: int = 0) -> Iterator[bytes]:
        """The blob's bytes from `start` on, in chunks."""
        at = 0
        for part in self._parts:
            size = _size(part)
            skipped = max(start - at, 0)
            if skipped < size:
                yield from part.read(skipped) if isinstance(part, Span) else [part[skipped:]]
            at += size

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
            for chunk in part.read(0):
                blob.update(chunk)
                content.update(chunk)
                progress(len(chunk))
            entries[next(names)] = FileEntry(size=part.size, sha256=content.hexdigest())
        return LayerFiles(f"sha256:{blob.hexdigest()}", self.size, entries)


def layers_of(files: Mapping[str, Span]) -> list[LayerBlob]:
    """A layer for each file, by name; over `MAX_LAYERS` the smallest files share the last one.

    Raises:
        EngineCorrupt: a name that a layer cannot have.
    """
    for name in files:
        if any(part.startswith(_WHITEOUT) for part in name.split("/")) or not name.isprintable():
            raise EngineCorrupt(f"{printable(name)}: no name for a file of a layer")
    by_size = sorted(files, key=lambda name: (-files[name].size, name))
    alone = by_size if len(files) <= MAX_LAYERS else by_size[: MAX_LAYERS - 1]
    together = set(files) - set(alone)
    bundle: Sequence[LayerBlob] = (
        [LayerBlob({name: files[name] for name in together})] if together else []
    )
    return [*(LayerBlob({name: files[name]}) for name in sorted(alone)), *bundle]


def _header(name: str, size: int) -> bytes:
    header = tarfile.TarInfo(name)
    header.mode = 0o644
    header.size = size
    return header.tobuf(tarfile.PAX_FORMAT)


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.size
