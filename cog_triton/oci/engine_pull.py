"""Pull of an engine from a registry: its layers, unpacked by digest, and a directory of them.

Engines that share a layer share its files on the disk.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.artifact.engine_manifest import FileEntry
from cog_triton.artifact.tar_members import MAX_MEMBERS
from cog_triton.download import disk_space
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo, Progress, size_text
from cog_triton.download.url_download import in_parallel
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.oci import image_manifest
from cog_triton.oci.image_manifest import WHITEOUT, Descriptor
from cog_triton.oci.reference import Reference
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import printable

_ENTRIES = TypeAdapter(dict[str, FileEntry])
_LAYERS_AT_ONCE = 3
StoredFiles = Mapping[str, tuple[Path, FileEntry]]
"""Files of a layer by name: where they are, and what they were when they were unpacked."""


def _unpack(blob: Path, fresh: Path, name: str) -> None:
    (fresh / "files").mkdir()
    try:
        files = engine_tar.extract(blob, fresh / "files", links=False)
    except EngineCorrupt as error:
        raise EngineCorrupt(f"{name}: {error.detail}") from None
    for file in files:
        if any(part.startswith(WHITEOUT) for part in file.split("/")):
            raise EngineCorrupt(f"{name}: {printable(file)}: deletes a file of another")
    (fresh / "index.json").write_bytes(_ENTRIES.dump_json(files))
    fresh.chmod(0o755)


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
        self._layers, self._blobs = directory / "oci/layers", directory / "oci/blobs"
        self._engines = directory / "engines"
        self._echo, self._stop, self._retry = echo, stop, retry
        self._plain_http = plain_http

    def resolve(self, reference: Reference) -> Reference:
        """Ask the registry what `reference` is, and say it; the result has its digest.

        Raises:
            ModelUnavailable: it cannot be had, or is not what its digest says.
            EngineCorrupt: it is an index, or no engine.
        """
        with self._registry(reference) as registry:
            return self._resolved(registry)[0]

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
            pinned, layers = self._resolved(registry)
            digest = pinned.digest or ""
            if found := self._located(digest):
                return found
            self._fetch_all(registry, layers)
        target = self._path(digest)
        with disk_space.writing(target, str(reference), self._echo, self._stop, "unpacking it"):
            return self._located(digest) or self._assemble(str(pinned), layers, target)

    def _registry(self, reference: Reference) -> Registry:
        return Registry(reference, self._echo, self._retry, self._stop, plain_http=self._plain_http)

    def _resolved(self, registry: Registry) -> tuple[Reference, Sequence[Descriptor]]:
        digest, body = registry.manifest()
        reference = registry.reference
        layers = image_manifest.parse(body, str(reference)).layers
        if reference.digest is None:
            size = size_text(sum(layer.size for layer in layers))
            self._echo(f"[download] {reference} is {digest}, {size}")
        return reference.pinned(digest), layers

    def _fetch_all(self, registry: Registry, layers: Sequence[Descriptor]) -> None:
        """Fetch the layers that lack, the largest first, several at once."""
        lacking = [layer for layer in layers if self._files(layer.digest) is None]
        lacking.sort(key=lambda layer: -layer.size)
        name, total = str(registry.reference), sum(layer.size for layer in lacking)
        if shared := sum(layer.size for layer in layers) - total:
            self._echo(f"[download] {name}: {size_text(shared)} of it are here")
        # Each layer is a tar and its files until it is unpacked.
        most = total + sum(layer.size for layer in lacking[:_LAYERS_AT_ONCE])
        disk_space.require(self._engines, most, name)
        halt = threading.Event()
        with Progress(name, self._echo, total) as progress:
            in_parallel(
                lacking,
                lambda layer: self._fetch(layer, registry, progress, halt),
                _LAYERS_AT_ONCE,
                halt,
                registry.backoff().require_running,
            )

    def _files(self, digest: str) -> StoredFiles | None:
        """The files of an unpacked layer, if all of them are here."""
        path = self._layers / digest.removeprefix("sha256:")
        try:
            entries = _ENTRIES.validate_json((path / "index.json").read_bytes())
            files = {name: (path / "files" / name, entry) for name, entry in entries.items()}
            whole = all(file.stat().st_size == entry.size for file, entry in files.values())
        except (OSError, ValidationError):
            return None
        return files if whole else None

    def _fetch(
        self, layer: Descriptor, registry: Registry, progress: Progress, halt: threading.Event
    ) -> None:
        """Download, verify and unpack a layer: it appears whole, or not at all."""
        path = self._layers / layer.digest.removeprefix("sha256:")
        name = f"{registry.reference}: layer {layer.digest}"
        with disk_space.writing(path, name, registry.echo, halt):
            if self._files(layer.digest) is not None:
                progress.skip(layer.size)
                return
            blob = registry.fetch_blob(layer, self._blobs / path.name, progress, halt)
            try:
                with disk_space.scratch(path) as fresh:
                    _unpack(blob, fresh, name)
                    shutil.rmtree(path, ignore_errors=True)
                    fresh.rename(path)
            finally:
                blob.unlink(missing_ok=True)

    def _located(self, digest: str) -> Path | None:
        """The engine of a manifest's digest, if it was made; raises E1306 where it was damaged."""
        path = self._path(digest)
        if not path.is_dir():
            return None
        if manifest := engine_manifest.load(path):
            engine_manifest.verify(path, manifest)
        return path

    def _path(self, digest: str) -> Path:
        return self._engines / f"oci-{digest.removeprefix('sha256:')[:16]}"

    def _assemble(self, name: str, layers: Sequence[Descriptor], target: Path) -> Path:
        """Make the engine's directory of links to its layers' files, checked by its manifest."""
        files: dict[str, tuple[Path, FileEntry]] = {}
        for layer in layers:
            stored = self._files(layer.digest)
            if stored is None:
                raise ModelUnavailable(f"{name}: layer {layer.digest} was removed meanwhile")
            # Layers are in no order: none hides a file of another.
            if twice := files.keys() & stored.keys():
                raise EngineCorrupt(f"{name}: {printable(min(twice))} is in two of its layers")
            files |= stored
            if len(files) > MAX_MEMBERS:
                raise EngineCorrupt(f"{name}: has over {MAX_MEMBERS} files")
        for parent in (str(parent) for file in files for parent in PurePosixPath(file).parents):
            if parent in files:
                raise EngineCorrupt(f"{name}: {printable(parent)} is a file and a directory")
        with disk_space.scratch(target) as fresh:
            for file, (source, _) in files.items():
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                _link(source, fresh / file)
            manifest = engine_manifest.load(fresh)
            if manifest is None:
                self._echo(f"{name} has no manifest: what it was built for cannot be checked")
            else:
                entries = {file: entry for file, (_, entry) in files.items()}
                for difference in engine_tar.differences(manifest, entries):
                    raise EngineCorrupt(f"{name}: {difference}")
            fresh.chmod(0o755)
            fresh.rename(target)
        return target


def _link(source: Path, target: Path) -> None:
    """Give the file `source` a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
