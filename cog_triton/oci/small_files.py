"""Small files of an engine in a registry, read without its weights."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from cog_triton.artifact import tar_members
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.errors import EngineCorrupt
from cog_triton.oci import image_manifest
from cog_triton.oci.image_manifest import COG_CONFIG, Descriptor, Digest
from cog_triton.oci.reference import Reference
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import printable

MAX_BYTES = 16 << 20
"""Most bytes of a layer that is fetched for a small file, as it is sent and as it is unpacked."""


@dataclass(frozen=True)
class SmallFiles:
    """Contents of files by name, and the `reference` with the digest that they are of.

    `held` are the names of all files that the registry says it has; None if it does not say.
    """

    reference: Reference
    contents: Mapping[str, bytes]
    held: frozenset[str] | None


class _ListedFile(BaseModel):
    path: str
    layer: Digest


class _CogConfig(BaseModel):
    files: list[_ListedFile]


Layers = Sequence[tuple[str | None, Descriptor]]
"""Layers, each with the name of a file in it; None for what is not said to be in it."""


class SmallFilesReader:
    """Reader of the engine that `reference` is.

    Args:
        echo: gets the lines of retries.
        stop: ends it from another thread.
        plain_http: registries that are reached without TLS.
    """

    def __init__(
        self,
        reference: Reference,
        echo: Echo,
        stop: threading.Event,
        *,
        plain_http: Collection[str] = (),
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008
    ) -> None:
        self._reference, self._echo, self._stop, self._retry = reference, echo, stop, retry
        self._plain_http = plain_http

    def read(self, names: Collection[str]) -> SmallFiles:
        """Fetch those of `names` that the engine has, each in a layer of at most `MAX_BYTES`.

        Raises:
            ModelUnavailable: it cannot be had, or is not what its digest says.
            EngineCorrupt: it is an index, or no engine, or a layer is too large or broken.
        """
        with (
            Registry(
                self._reference, self._echo, self._retry, self._stop, plain_http=self._plain_http
            ) as registry,
            tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch,
        ):
            digest, body = registry.manifest()
            image = image_manifest.parse(body, str(self._reference))
            layers: Layers = [(layer.title, layer) for layer in image.layers]
            if image.config is not None and image.config.mediaType == COG_CONFIG:
                config = self._fetch(image.config, registry, Path(scratch))
                layers = self._listed(config.read_bytes(), image.layers)
            contents: dict[str, bytes] = {}
            for layer in self._wanted(layers, names):
                blob = self._fetch(layer, registry, Path(scratch))
                contents |= self._members(blob, layer, names)
        held = [name for name, _ in layers if name is not None]
        return SmallFiles(
            self._reference.pinned(digest),
            contents,
            frozenset(held) if len(held) == len(layers) else None,
        )

    def _listed(self, config: bytes, layers: Sequence[Descriptor]) -> Layers:
        """The layers of the files that Cog's config names."""
        known = {layer.digest: layer for layer in layers}
        try:
            files = _CogConfig.model_validate_json(config).files
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"]
            raise EngineCorrupt(f"{self._reference}: its config is not Cog's: {why}") from None
        if lost := next((file for file in files if file.layer not in known), None):
            raise EngineCorrupt(
                f"{self._reference}: its config has {printable(lost.path)} in {lost.layer}, which"
                " is no layer of it"
            )
        return [(file.path, known[file.layer]) for file in files]

    def _wanted(self, layers: Layers, names: Collection[str]) -> list[Descriptor]:
        """Layers to fetch for `names`: theirs, else the smallest of which nothing is said."""
        silent = sorted((one for said, one in layers if said is None), key=lambda one: one.size)
        sizes = itertools.accumulate(one.size for one in silent)
        small = [one for one, size in zip(silent, sizes, strict=True) if size <= MAX_BYTES]
        found: dict[str, Descriptor] = {}
        for name in names:
            its = [layer for said, layer in layers if said == name]
            if len(its) > 1:
                raise EngineCorrupt(f"{self._reference}: {name} is in two of its layers")
            found |= {layer.digest: layer for layer in its or small}
        return list(found.values())

    def _fetch(self, blob: Descriptor, registry: Registry, scratch: Path) -> Path:
        name = f"{self._reference}: {blob.digest}"
        if blob.size > MAX_BYTES:
            raise EngineCorrupt(f"{name} has {blob.size} bytes; must be at most {MAX_BYTES}")
        target = scratch / blob.digest.removeprefix("sha256:")
        with Progress(name, lambda _: None, blob.size) as progress:
            return registry.fetch_blob(blob, target, progress, self._stop)

    def _members(self, blob: Path, layer: Descriptor, names: Collection[str]) -> dict[str, bytes]:
        found, size = {}, 0
        try:
            for member in tar_members.read(blob):
                size += member.size
                if size > MAX_BYTES:  # before any of it is unpacked
                    raise EngineCorrupt(f"has over {MAX_BYTES} bytes in it")
                if member.name in names and member.content is not None:
                    found[member.name] = member.content.read()
        except EngineCorrupt as error:
            why = error.detail.removeprefix(f"{blob}: ")
            raise EngineCorrupt(f"{self._reference}: layer {layer.digest}: {why}") from None
        return found
