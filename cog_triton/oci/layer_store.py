"""Store of layers, unpacked by digest: engines that share a layer share its files on the disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cog_triton.artifact import engine_tar
from cog_triton.artifact.engine_manifest import FileEntry
from cog_triton.download import disk_space
from cog_triton.download.transfer_progress import Progress
from cog_triton.errors import EngineCorrupt
from cog_triton.oci.image_manifest import Descriptor
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import printable

_WHITEOUT = ".wh."
_ENTRIES = TypeAdapter(dict[str, FileEntry])


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
        with disk_space.coded_errors(path, name), disk_space.locked(path, registry.echo, halt):
            if self.locate(layer.digest) is not None:
                progress.skip(layer.size)
                return
            blob = registry.fetch_blob(layer, self._blobs / path.name, progress, halt)
            try:
                self._unpack(blob, path, name)
            finally:
                blob.unlink(missing_ok=True)

    def _unpack(self, blob: Path, path: Path, name: str) -> None:
        for left in path.parent.glob(f".{path.name}.*"):  # by one that was killed
            shutil.rmtree(left)
        fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
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
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _path(self, digest: str) -> Path:
        return self._layers / digest.removeprefix("sha256:")


def link(source: Path, target: Path) -> None:
    """Give the file `source` a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
