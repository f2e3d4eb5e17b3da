"""Small files in a registry, read without layers of weights: an engine's, and an image's config."""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cog_triton.artifact import tar_members
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.errors import EngineCorrupt
from cog_triton.oci import image_manifest
from cog_triton.oci.image_manifest import COG_CONFIG, TAR, Descriptor, Digest, Image
from cog_triton.oci.reference import DIGEST, Reference
from cog_triton.oci.registry_client import Registry
from cog_triton.system.printable import first_problem, printable

MAX_BYTES = 16 << 20
"""Most bytes of a layer that is fetched for a small file, as it is sent and as it is unpacked."""
Layers = Sequence[tuple[str | None, Descriptor]]
"""Layers, each with the name of a file in it; None for what is not said to be in it."""
_MAX_CONFIG = 16 << 20
_PLATFORM = {"os": "linux", "architecture": "amd64"}


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


def read(
    reference: Reference,
    names: Collection[str],
    echo: Echo,
    *,
    plain_http: Collection[str] = (),
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> SmallFiles:
    """Fetch those of `names` that the engine `reference` has, each in a layer of `MAX_BYTES`.

    Args:
        echo: gets the lines of retries.
        plain_http: registries that are reached without TLS.

    Raises:
        ModelUnavailable: it cannot be had, or is not what its digest says.
        EngineCorrupt: it is an index, or no engine, or a layer is too large or broken.
    """
    with (
        Registry(reference, echo, retry, threading.Event(), plain_http=plain_http) as registry,
        tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch,
    ):
        digest, body = registry.manifest()
        image = image_manifest.parse(body, str(reference))
        layers: Layers = [(layer.title, layer) for layer in image.layers]
        if image.config is not None and image.config.mediaType == COG_CONFIG:
            config = _fetch(image.config, registry, Path(scratch))
            layers = _listed(config.read_bytes(), image.layers, reference)
        contents: dict[str, bytes] = {}
        for layer in _wanted(layers, names, reference):
            blob = _fetch(layer, registry, Path(scratch))
            contents |= _members(blob, layer, names, reference)
    held = [name for name, _ in layers if name is not None]
    return SmallFiles(
        reference.pinned(digest), contents, frozenset(held) if len(held) == len(layers) else None
    )


def _listed(config: bytes, layers: Sequence[Descriptor], reference: Reference) -> Layers:
    """The layers of the files that Cog's config names."""
    known = {layer.digest: layer for layer in layers}
    try:
        files = _CogConfig.model_validate_json(config).files
    except ValidationError as error:
        why = first_problem(error)
        raise EngineCorrupt(f"{reference}: its config is not Cog's: {why}") from None
    if lost := next((file for file in files if file.layer not in known), None):
        raise EngineCorrupt(
            f"{reference}: its config has {printable(lost.path)} in {lost.layer}, which"
            " is no layer of it"
        )
    return [(file.path, known[file.layer]) for file in files]


def _wanted(layers: Layers, names: Collection[str], reference: Reference) -> list[Descriptor]:
    """Layers to fetch for `names`: theirs, else the smallest of which nothing is said."""
    silent = sorted((one for said, one in layers if said is None), key=lambda one: one.size)
    sizes = itertools.accumulate(one.size for one in silent)
    small = [one for one, size in zip(silent, sizes, strict=True) if size <= MAX_BYTES]
    found: dict[str, Descriptor] = {}
    for name in names:
        its = [layer for said, layer in layers if said == name]
        if len(its) > 1:
            raise EngineCorrupt(f"{reference}: {name} is in two of its layers")
        found |= {layer.digest: layer for layer in its or small}
    return list(found.values())


def _fetch(blob: Descriptor, registry: Registry, scratch: Path) -> Path:
    name = f"{registry.reference}: {blob.digest}"
    if blob.size > MAX_BYTES:
        raise EngineCorrupt(f"{name} has {blob.size} bytes; must be at most {MAX_BYTES}")
    target = scratch / blob.digest.removeprefix("sha256:")
    with Progress(name, lambda _: None, blob.size) as progress:
        return registry.fetch_blob(blob, target, progress, registry.stop)


def _members(
    blob: Path, layer: Descriptor, names: Collection[str], reference: Reference
) -> dict[str, bytes]:
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
        raise EngineCorrupt(f"{reference}: layer {layer.digest}: {why}") from None
    return found


@dataclass(frozen=True)
class ImageFacts:
    """Labels, environment and layers of the image `reference`; sizes in bytes.

    `unpacked` is None where layers are compressed: no manifest tells what they hold.
    """

    reference: Reference
    labels: Mapping[str, str]
    environment: Mapping[str, str]
    compressed: int
    unpacked: int | None


class _Container(BaseModel):
    Labels: dict[str, str] | None = None
    Env: list[str] | None = None


class _Config(BaseModel):
    config: _Container = _Container()


def read_image(
    reference: Reference,
    echo: Echo,
    *,
    plain_http: Collection[str] = (),
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> ImageFacts:
    """Read an image's manifest and config, of an index those for linux/amd64; no layer is fetched.

    Raises:
        ModelUnavailable: it cannot be had.
        EngineCorrupt: no image, none for linux/amd64, or a document breaks a rule.
    """
    stop = threading.Event()
    with Registry(reference, echo, retry, stop, plain_http=plain_http) as registry:
        digest, body = registry.manifest()
        if chosen := _for_platform(body, reference):
            return read_image(reference.pinned(chosen), echo, plain_http=plain_http, retry=retry)
        try:
            image = Image.model_validate_json(body)
            blob = image.config
            if blob is None or blob.size > _MAX_CONFIG:
                raise EngineCorrupt(f"{reference}: has no config of at most {_MAX_CONFIG} bytes")
            with (
                tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch,
                Progress(str(reference), lambda _: None, blob.size) as progress,
            ):
                target = Path(scratch, "config")
                path = registry.fetch_blob(blob, target, progress, stop)
                config = _Config.model_validate_json(path.read_bytes()).config
        except ValidationError as error:
            raise EngineCorrupt(f"{reference}: is no image: {first_problem(error)}") from None
    compressed = sum(layer.size for layer in image.layers)
    return ImageFacts(
        reference.pinned(digest),
        config.Labels or {},
        dict(line.partition("=")[::2] for line in config.Env or ()),
        compressed,
        compressed if all(layer.mediaType == TAR for layer in image.layers) else None,
    )


def _for_platform(body: bytes, reference: Reference) -> str | None:
    """Digest of the image for linux/amd64 if `body` is an index, None if it is a manifest."""
    try:
        value: Any = json.loads(body)
        entries = value.get("manifests")
        if entries is None:
            return None
        for entry in entries:
            if _PLATFORM.items() <= (entry.get("platform") or {}).items():
                if DIGEST.fullmatch(entry["digest"]) is None:
                    raise ValueError
                return str(entry["digest"])
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise EngineCorrupt(f"{reference}: its manifest is no image's") from None
    raise EngineCorrupt(f"{reference}: its index has no image for linux/amd64")
