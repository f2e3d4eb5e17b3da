"""Facts of an image in a registry: labels and environment of its config, sizes of its layers."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.errors import EngineCorrupt
from cog_triton.oci.image_manifest import TAR, Image
from cog_triton.oci.reference import DIGEST, Reference
from cog_triton.oci.registry_client import Registry

_MAX_CONFIG = 16 << 20
_PLATFORM = {"os": "linux", "architecture": "amd64"}


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


def read(
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
            return read(reference.pinned(chosen), echo, plain_http=plain_http, retry=retry)
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
            why = error.errors(include_url=False)[0]["msg"]
            raise EngineCorrupt(f"{reference}: is no image: {why}") from None
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
