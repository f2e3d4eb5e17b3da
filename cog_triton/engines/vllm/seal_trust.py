"""Trust in seals: whose compiled code is opened, by the digest of the manifest that names it.

What vLLM compiled is a pickle, and what Triton compiled is loaded into the process: both are code
of whoever made the tar. They are used if this user built the engine on this host, which the build
records, or if whoever starts the server pins the digest, or a key that signed the engine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import engine_manifest
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, Manifest
from cog_triton.engines.vllm.compiler_caches import require_own
from cog_triton.errors import EngineCorrupt, EngineIncompatible, InvalidArgument

FOLDER = "trusted-seals"
"""Its name in the work directory: an empty file for each manifest that was built here."""
_PREFIX = "sha256:"


def remember(work_dir: Path, digest: str) -> None:
    """Record that this user built the engine whose manifest has this digest, in hexadecimal.

    Raises:
        EngineIncompatible: others may write to the records.
    """
    base = work_dir / FOLDER
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(base)
    (base / digest).touch(mode=0o600)


def built_here(work_dir: Path) -> set[str]:
    """Digests of the manifests whose engines this user built on this host."""
    base = work_dir / FOLDER
    try:
        require_own(base)
        return {path.name for path in base.iterdir()}
    except (OSError, EngineIncompatible):
        return set()


@dataclass(frozen=True)
class SealedManifest:
    """Manifest of an engine directory with something that schema 3 has, and its digest."""

    directory: Path
    manifest: Manifest
    digest: str

    @classmethod
    def of(cls, directory: Path) -> SealedManifest | None:
        """That of `directory`; None if it has none, or one of another schema. Raises E1306."""
        path = directory / MANIFEST_NAME
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                text = file.read(engine_manifest.MAX_TEXT + 1)
        except OSError as error:
            raise EngineCorrupt(f"{path}: cannot be read: {error.strerror}") from error
        return cls.parse(text, directory)

    @classmethod
    def parse(cls, text: bytes, engine: Path) -> SealedManifest | None:
        """That of `text`, the manifest of `engine`; as `of`."""
        manifest = engine_manifest.parse(text, f"{engine}: {MANIFEST_NAME}")
        if manifest.schema_ < 3:
            return None
        return cls(engine, manifest, hashlib.sha256(text).hexdigest())

    def distrust(
        self, work_dir: Path, pins: Collection[str], registry_digest: str | None
    ) -> str | None:
        """Why its seals are not to be opened; None if they are trusted.

        Args:
            pins: `checked_pins`, each the digest of a manifest or of an engine in its registry.
            registry_digest: what the engine was pulled by, ``sha256:...``.
        """
        known = {self.digest, (registry_digest or "").removeprefix(_PREFIX)}
        if known & {*(pins or built_here(work_dir))}:
            return None
        if pins:
            return f"SEAL_SHA256 is {', '.join(pins)}, and its manifest has sha256 {self.digest}"
        return (
            "compiled code runs as this user, and this engine was not built by this user on this"
            f" host: if you trust who made it, set SEAL_SHA256={self.digest}"
        )


def checked_pins(setting: str | None) -> list[str]:
    """The digests of SEAL_SHA256, in hexadecimal; raises E1005 for what is none."""
    pins = [pin.strip().removeprefix(_PREFIX) for pin in (setting or "").split(",")]
    for pin in filter(None, pins):
        if not re.fullmatch("[0-9a-f]{64}", pin):
            raise InvalidArgument(
                f"SEAL_SHA256={pin[:80]!r}: must be 64 hexadecimal digits, with or without sha256:"
                " before, or several of them with commas between"
            )
    return [pin for pin in pins if pin]
