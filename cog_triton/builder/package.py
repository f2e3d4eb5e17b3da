"""Packaging of an engine directory as engine.tar, with tokenizer, build config and manifest."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cog_triton.artifact import engine_config, engine_manifest, engine_tar, tar_compression
from cog_triton.artifact.canary import CANARY_NAME
from cog_triton.artifact.engine_config import TENSORRT_LLM, EngineConfig
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, FileEntry, Manifest
from cog_triton.builder import build_canary, built_engine, packed_adapters, provenance
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.packed_adapters import PackedAdapter
from cog_triton.engines.tensorrt_llm.runtime_settings import carried
from cog_triton.errors import BuildStepFailed, EngineCorrupt, InvalidArgument
from cog_triton.inspection import required_files

Echo = Callable[[str], None]

CONFIG_NAME = "build_config.yaml"
# Tokenizer files of a model on the hub.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Files of a slow tokenizer, which has no tokenizer.json.
_SLOW_TOKENIZER = ("vocab.json", "vocab.txt", "merges.txt")
_SAID_EVERY_S = 3.0  # below build_progress.QUIET_S, whose line says no share


def check(output: Path, echo: Echo) -> None:
    """Check, before a build, that an engine.tar can be written to `output`.

    `echo` gets a line if its directory is yet to be made.

    Raises:
        InvalidArgument: its suffix is no tar's, it is a directory, or it lies where none can be
            written.
    """
    tar_compression.by_name(output)
    if output.is_dir():
        raise InvalidArgument(f"output {str(output)!r}: is a directory")
    place = next(path for path in output.absolute().parents if os.path.lexists(path))
    if not place.is_dir():
        raise InvalidArgument(f"output {str(output)!r}: {place} is not a directory")
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:  # /proc has permissions as any directory
        raise InvalidArgument(
            f"output {str(output)!r}: {place} cannot be written to: {error.strerror}"
        ) from error
    if place != output.absolute().parent:
        echo(f"[package] {output.parent} is not there, and will be made")


def write(
    config: BuildConfig,
    engine_dir: Path,
    model_dir: Path,
    output: Path,
    *,
    revision: str | None = None,
    adapters: Sequence[PackedAdapter] = (),
    echo: Echo,
) -> None:
    """Pack `engine_dir` with its tokenizer, build_config.yaml and cog-triton.json into `output`.

    Args:
        model_dir: where tokenizer files are taken from that `engine_dir` lacks.
        revision: of the model, as its origin names it.
        adapters: LoRA adapters to pack with it.
        echo: gets progress and warnings, a line each.

    Raises:
        InvalidArgument: `output` has another suffix than a tar's.
        BuildConfigInvalid: the engine cannot be served with what `config` says of that.
        BuildStepFailed: the engine has no usable config.json, or not the files that it asks for.
        EngineIncompatible: NVIDIA's driver does not work, or an adapter does not fit.
        DiskFull: there is no room for `output`.
    """
    described = _read_config(engine_dir)
    files = engine_manifest.files_of(engine_dir)
    files.pop(MANIFEST_NAME, None)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    problem = required_files.problem(described, sizes)
    ranks = described.pretrained_config.mapping.ranks
    if not problem and config.world_size not in (None, ranks):
        problem = (
            f"the engine has {ranks} ranks, the build config's world_size is {config.world_size}"
        )
    if problem:
        raise BuildStepFailed(f"{engine_dir}: {problem}")
    members: dict[str, Path | bytes] = {**_tokenizer(described, model_dir), **files}
    if "tokenizer.json" not in members:
        echo("[package] warning: neither engine nor model has tokenizer.json, which a runner needs")
    built_engine.check(config, described, engine_dir)
    packed_adapters.check_built(adapters, described, engine_dir)
    for each in adapters:
        members |= each.members()
    runtime = carried(config.runtime)
    versions = provenance.versions(described, echo)
    sm, gpu_name = provenance.gpus(described, echo)
    limits = described.build_config
    text = config.to_yaml().encode()
    members[CONFIG_NAME] = text
    made = build_canary.make(described.engine, engine_dir, echo)
    if made is not None:
        members[CANARY_NAME] = made.to_json().encode()

    def describe(entries: dict[str, FileEntry]) -> Manifest:
        return Manifest(
            schema=2 if runtime or adapters else 1,
            engine=described.engine,
            model_id=config.model_id,
            revision=revision,
            config_sha256=hashlib.sha256(text).hexdigest(),
            sm=sm,
            gpu_name=gpu_name,
            versions=dict(sorted(versions.items())),
            world_size=ranks,
            max_input_len=limits.max_input_len,
            max_seq_len=limits.seq_len,
            max_batch_size=limits.max_batch_size,
            runtime=runtime,
            lora_adapters={each.name: each.entry for each in adapters},
            files=entries,
        )

    total = sum(map(engine_tar.size_of, members.values()))
    engine_tar.pack(members, output, describe, _Progress(total, echo))


def _read_config(engine_dir: Path) -> EngineConfig:
    path = engine_dir / engine_config.CONFIG_NAME
    try:
        return engine_config.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise BuildStepFailed(f"{path}: cannot be read: {error.strerror}") from error
    except EngineCorrupt as error:
        raise BuildStepFailed(f"the engine cannot be used: {error.detail}") from error


def _tokenizer(config: EngineConfig, model_dir: Path) -> dict[str, Path]:
    """The model's tokenizer files, for families whose build leaves them out of the engine."""
    if config.engine != TENSORRT_LLM:
        return {}
    whole = (model_dir / "tokenizer.json").is_file()
    names = _TOKENIZER if whole else (*_TOKENIZER, *_SLOW_TOKENIZER)
    return {name: model_dir / name for name in names if (model_dir / name).is_file()}


class _Progress:
    """Progress lines of a tar that takes long, one every few seconds."""

    def __init__(self, total: int, echo: Echo) -> None:
        self._total, self._echo = total, echo
        self._done, self._said_at = 0, time.monotonic()

    def __call__(self, size: int) -> None:
        self._done += size
        if (now := time.monotonic()) - self._said_at >= _SAID_EVERY_S:
            self._said_at = now
            share = self._done / self._total
            self._echo(f"[package] {share:.0%} of {self._total / 1e6:.0f} MB")
