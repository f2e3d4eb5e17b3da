"""Image manifest of an engine: parsed with limits, or made of its layers.

An engine is an OCI image whose layers are plain tars of one file each, with an image's own config.
What mounts images then mounts engines: Kubernetes' image volumes need that config's ``diff_ids``
(containerd refuses artifacts of other kinds). In the form ``cog`` the same layers have Cog's own
config for managed weights.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from cog_triton.artifact.engine_manifest import FileEntry, Manifest
from cog_triton.errors import EngineCorrupt
from cog_triton.system.printable import first_problem, printable

MAX_MANIFEST = 4 << 20
"""Most bytes of a manifest, as registries have it."""
MAX_LAYERS = 1 << 10
WHITEOUT = ".wh."
"""Begins the name of a file that deletes one of another layer."""
IMAGE = "application/vnd.oci.image.manifest.v1+json"
TAR = "application/vnd.oci.image.layer.v1.tar"
ACCEPTED = (
    IMAGE,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_LAYERS = (TAR, f"{TAR}+gzip", f"{TAR}+zstd", "application/vnd.docker.image.rootfs.diff.tar.gzip")
_IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
_COG = "application/vnd.cog.weight.v1"
COG_CONFIG = "application/vnd.cog.weight.config.v1+json"
_TITLE = "org.opencontainers.image.title"
_BUNDLE = re.compile(r"\d+ files")
_SHOWN = 8
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class Descriptor(BaseModel):
    """Media type, digest and size in bytes of a blob; `annotations` are no more than said of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    mediaType: str = Field(max_length=255)  # noqa: N815
    digest: Digest
    size: int = Field(ge=0)
    annotations: dict[str, Any] | None = None

    @property
    def title(self) -> str | None:
        """The file that the layer is said to be; None if nothing is said, or several files."""
        title = (self.annotations or {}).get(_TITLE)
        return title if isinstance(title, str) and not _BUNDLE.fullmatch(title) else None


class Image(BaseModel):
    """Layers of an image manifest, and its config."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    schemaVersion: Literal[2]  # noqa: N815
    config: Descriptor | None = None
    layers: list[Descriptor] = Field(min_length=1, max_length=MAX_LAYERS)


def parse(body: bytes, origin: str) -> Image:
    """Parse the manifest `body`, which `origin` names in errors.

    Raises:
        EngineCorrupt: an index of several images, or a manifest that breaks a rule; says which.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise EngineCorrupt(f"{origin}: its manifest is not JSON") from None
    if isinstance(value, dict) and isinstance(value.get("manifests"), list):
        images = ", ".join(map(_indexed, value["manifests"][:_SHOWN]))
        raise EngineCorrupt(
            f"{origin}: is an index of {len(value['manifests'])} images, not an engine: name one"
            f" by its digest, @sha256:...; it has {images or 'none'}"
        )
    try:
        image = Image.model_validate_json(body)
    except ValidationError as error:
        raise EngineCorrupt(f"{origin}: its manifest: {first_problem(error)}") from None
    for layer in image.layers:
        if layer.mediaType not in _LAYERS:
            raise EngineCorrupt(
                f"{origin}: a layer is {printable(layer.mediaType)!r}, and no engine's; must be a"
                f" tar: {', '.join(_LAYERS)}"
            )
    if len({layer.digest for layer in image.layers}) != len(image.layers):
        raise EngineCorrupt(f"{origin}: its manifest has one layer twice")
    return image


def _indexed(entry: Any) -> str:
    """Digest and platform of an entry of an index, which may be anything."""
    known = entry if isinstance(entry, dict) else {}
    platform = known.get("platform")
    system = platform if isinstance(platform, dict) else {}
    name = "/".join(str(system.get(key, "?")) for key in ("os", "architecture"))
    return printable(f"{str(known.get('digest'))[:80]} ({name[:80]})")


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """A layer's blob, and the files in it by name."""

    digest: str
    size: int
    files: Mapping[str, FileEntry]

    @property
    def title(self) -> str:
        """Name for people: the file's, or how many there are."""
        return next(iter(self.files)) if len(self.files) == 1 else f"{len(self.files)} files"


@dataclass(frozen=True, slots=True)
class Made:
    """A manifest and its config, as they are sent; equal for equal engines."""

    manifest: bytes
    config: bytes

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return digest_of(self.manifest)


def image(layers: Sequence[LayerFiles], engine: Manifest | None) -> Made:
    """An image whose labels, and whose manifest's annotations, are the facts of `engine`."""
    facts = _facts(engine)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": facts},
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        "history": [{"created_by": "cog-triton push", "comment": layer.title} for layer in layers],
    }
    titles = [{_TITLE: layer.title} for layer in layers]
    return _made({}, _IMAGE_CONFIG, config, layers, titles, facts)


def cog_weight(layers: Sequence[LayerFiles], name: str, target: str) -> Made:
    """A managed weight of Cog, `name`, to be mounted at `target`."""
    files = sorted(
        (path, layer.digest, entry) for layer in layers for path, entry in layer.files.items()
    )
    listed = "\n".join(sorted(f"{entry.sha256}  {path}" for path, _, entry in files))
    about = {"name": name, "target": target, "setDigest": digest_of(listed.encode())}
    config = {
        **about,
        "files": [
            {"path": path, "layer": layer, "size": entry.size, "digest": f"sha256:{entry.sha256}"}
            for path, layer, entry in files
        ],
    }
    keys = zip(("name", "target", "set-digest"), about.values(), strict=True)
    annotations = {f"run.cog.weight.{key}": value for key, value in keys}
    sizes = [
        {"run.cog.weight.size.uncompressed": str(sum(e.size for e in layer.files.values()))}
        for layer in layers
    ]
    return _made({"artifactType": _COG}, COG_CONFIG, config, layers, sizes, annotations)


def _facts(engine: Manifest | None) -> dict[str, str]:
    if engine is None:
        return {}
    facts = {
        "engine": engine.engine,
        "model_id": engine.model_id,
        "revision": engine.revision,
        "sm": ",".join(map(str, engine.sm)),
        "gpu_name": engine.gpu_name,
        "world_size": str(engine.world_size),
        "max_seq_len": str(engine.max_seq_len),
        "max_batch_size": str(engine.max_batch_size),
        **{f"version.{name}": version for name, version in sorted(engine.versions.items())},
    }
    return {f"cog-triton.{key}": value for key, value in facts.items() if value}


def _made(
    kind: Mapping[str, str],
    config_type: str,
    config: Mapping[str, Any],
    layers: Sequence[LayerFiles],
    notes: Sequence[Mapping[str, str]],
    annotations: Mapping[str, str],
) -> Made:
    packed = _json(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        **kind,
        "config": {"mediaType": config_type, "digest": digest_of(packed), "size": len(packed)},
        "layers": [
            {"mediaType": TAR, "digest": layer.digest, "size": layer.size, "annotations": note}
            for layer, note in zip(layers, notes, strict=True)
        ],
        "annotations": annotations,
    }
    return Made(_json(manifest), packed)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def digest_of(data: bytes) -> str:
    """Digest of a blob: ``sha256:...``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
