"""Pull of an engine from a registry: its layers, unpacked by digest, and a directory of them.

Engines that share a layer share its files on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.artifact.engine_manifest import FileEntry
from cog_triton.artifact.tar_members import MAX_MEMBERS
from cog_triton.download import disk_space
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer import in_parallel
from cog_triton.download.transfer_progress import Echo, Progress, size_text
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.oci import image_manifest
from cog_triton.oci.image_manifest import Descriptor
from cog_triton.oci.reference import Reference
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import printable

_WHITEOUT = ".wh."
_ENTRIES = TypeAdapter(dict[str, FileEntry])
_LAYERS_AT_ONCE = 3


@dataclass(frozen=True)
class StoredLayer:
    """Files of a layer, below `root`, as they were when it was unpacked."""

    root: Path
    files: Mapping[str, FileEntry]


class LayerStore:
    """Layers below `directory`: each appears whole, or not at all."""

    def __init__(self, directory: Path) -> None:
        self._layers = directory / "layers"
        self._blobs = directory / "blobs"

    def locate(self, digest: str) -> StoredLayer | None:
        """The layer, if it is here with all its files."""
        path = self._path(digest)
        try:
            files = _ENTRIES.validate_json((path / "index.json").read_bytes())
            sizes = {name: (path / "files" / name).stat().st_size for name in files}
        except (OSError, ValidationError):
            return None
        whole = all(sizes[name] == entry.size for name, entry in files.items())
        return StoredLayer(path / "files", files) if whole else None

    def fetch(
        self,
        layer: Descriptor,
        registry: Registry,
        progress: Progress,
        halt: threading.Event,
    ) -> None:
        """Download, verify and unpack a layer that is not here.

        Raises:
            ModelUnavailable: it cannot be had, or has another digest or size.
            EngineCorrupt: it is no tar, or has an unsafe member; names it.
            DiskFull, BuildCancelled: finished pieces stay.
        """
        path = self._path(layer.digest)
        name = f"{registry.reference}: layer {layer.digest}"
        with disk_space.writing(path, name, registry.echo, halt):
            if self.locate(layer.digest) is not None:
                progress.skip(layer.size)
                return
            blob = registry.fetch_blob(layer, self._blobs / path.name, progress, halt)
            try:
                self._unpack(blob, path, name)
            finally:
                blob.unlink(missing_ok=True)

    def _unpack(self, blob: Path, path: Path, name: str) -> None:
        with disk_space.scratch(path) as fresh:
            (fresh / "files").mkdir()
            try:
                files = engine_tar.extract(blob, fresh / "files", links=False)
            except EngineCorrupt as error:
                raise EngineCorrupt(f"{name}: {error.detail}") from None
            for file in files:
                if any(part.startswith(_WHITEOUT) for part in file.split("/")):
                    raise EngineCorrupt(f"{name}: {printable(file)}: deletes a file of another")
            text = json.dumps({file: entry.model_dump() for file, entry in files.items()})
            (fresh / "index.json").write_text(text, "utf-8")
            shutil.rmtree(path, ignore_errors=True)
            fresh.chmod(0o755)
            fresh.rename(path)

    def _path(self, digest: str) -> Path:
        return self._layers / digest.removeprefix("sha256:")


def _link(source: Path, target: Path) -> None:
    """Give the file `source` a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class Resolved:
    """What a reference is now: with its digest, and `size` bytes of layers."""

    reference: Reference
    layers: tuple[Descriptor, ...]

    @property
    def size(self) -> int:
        """Bytes of all layers, as they are sent."""
        return sum(layer.size for layer in self.layers)


class Puller:
    """Pulls engines into `directory`, for others to find.

    Args:
        plain_http: registries that are reached without TLS.
        stop: ends a download from another thread.
    """

    def __init__(
        self,
        directory: Path,
        echo: Echo,
        stop: threading.Event,
        *,
        plain_http: Collection[str] = (),
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008
    ) -> None:
        self._store = LayerStore(directory / "oci")
        self._engines = directory / "engines"
        self._echo, self._stop, self._retry = echo, stop, retry
        self._plain_http = plain_http

    def resolve(self, reference: Reference) -> Resolved:
        """Ask the registry what `reference` is, and say it.

        Raises:
            ModelUnavailable: it cannot be had, or is not what its digest says.
            EngineCorrupt: it is an index, or no engine.
        """
        with self._registry(reference) as registry:
            return self._resolved(registry)

    def pull(self, reference: Reference) -> Path:
        """The engine directory of `reference`; without network if its digest was pulled before.

        Raises:
            As `resolve`, and:
            EngineCorrupt: an unsafe member, two files of one name, or other files than the
                engine's manifest says.
            DiskFull: no room.
            BuildCancelled: `stop` was set; finished layers and pieces stay.
        """
        if reference.digest is not None and (found := self._located(reference.digest)):
            return found
        with self._registry(reference) as registry:
            resolved = self._resolved(registry)
            digest = resolved.reference.digest or ""
            if found := self._located(digest):
                return found
            self._fetch(registry, resolved)
        target = self._path(digest)
        name = str(reference)
        with disk_space.writing(target, name, self._echo, self._stop, "unpacking it"):
            return self._located(digest) or self._assemble(resolved, target)

    def _registry(self, reference: Reference) -> Registry:
        return Registry(reference, self._echo, self._retry, self._stop, plain_http=self._plain_http)

    def _resolved(self, registry: Registry) -> Resolved:
        digest, body = registry.manifest()
        layers = image_manifest.parse(body, str(registry.reference)).layers
        found = Resolved(registry.reference.pinned(digest), tuple(layers))
        if registry.reference.digest is None:
            self._echo(f"[download] {registry.reference} is {digest}, {size_text(found.size)}")
        return found

    def _fetch(self, registry: Registry, resolved: Resolved) -> None:
        """Fetch the layers that lack, the largest first, several at once."""
        lacking = [layer for layer in resolved.layers if not self._store.locate(layer.digest)]
        lacking.sort(key=lambda layer: -layer.size)
        total = sum(layer.size for layer in lacking)
        shared = resolved.size - total
        if shared:
            self._echo(f"[download] {registry.reference}: {size_text(shared)} of it are here")
        # Each layer is a tar and its files until it is unpacked.
        most = total + sum(layer.size for layer in lacking[:_LAYERS_AT_ONCE])
        disk_space.require(self._engines, most, str(registry.reference))
        halt = threading.Event()
        with Progress(str(registry.reference), self._echo, total) as progress:
            in_parallel(
                lacking,
                lambda layer: self._store.fetch(layer, registry, progress, halt),
                _LAYERS_AT_ONCE,
                halt,
                registry.require_not_stopped,
            )

    def _located(self, digest: str) -> Path | None:
        """The engine of a manifest's digest, if it was made; raises E1306 where it was damaged."""
        path = self._path(digest)
        if not path.is_dir():
            return None
        if manifest := engine_manifest.load(path):
            engine_manifest.verify(path, manifest, checksums=False)
        return path

    def _path(self, digest: str) -> Path:
        return self._engines / f"oci-{digest.removeprefix('sha256:')[:16]}"

    def _assemble(self, resolved: Resolved, target: Path) -> Path:
        """Make the engine's directory of links to its layers' files, checked by its manifest."""
        name = str(resolved.reference)
        files: dict[str, Path] = {}
        entries: dict[str, FileEntry] = {}
        for layer in resolved.layers:
            stored = self._store.locate(layer.digest)
            if stored is None:
                raise ModelUnavailable(f"{name}: layer {layer.digest} was removed meanwhile")
            _add(files, stored, name)
            entries.update(stored.files)
        _require_directories(files, name)
        with disk_space.scratch(target) as fresh:
            for file, source in files.items():
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                _link(source, fresh / file)
            manifest = engine_manifest.load(fresh)
            if manifest is None:
                self._echo(f"{name} has no manifest: what it was built for cannot be checked")
            else:
                for difference in engine_tar.differences(manifest, entries):
                    raise EngineCorrupt(f"{name}: {difference}")
            fresh.chmod(0o755)
            fresh.rename(target)
        return target


def _add(files: dict[str, Path], layer: StoredLayer, name: str) -> None:
    """Add a layer's files; raises E1306 where one is also in another layer.

    Layers are in no order: none hides a file of another.
    """
    for file in layer.files:
        if file in files:
            raise EngineCorrupt(f"{name}: {printable(file)} is in two of its layers")
        files[file] = layer.root / file
    if len(files) > MAX_MEMBERS:
        raise EngineCorrupt(f"{name}: has over {MAX_MEMBERS} files")


def _require_directories(files: Mapping[str, Path], name: str) -> None:
    for file in files:
        for parent in PurePosixPath(file).parents:
            if str(parent) in files:
                raise EngineCorrupt(f"{name}: {printable(str(parent))} is a file and a directory")
