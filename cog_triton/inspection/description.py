"""Description of an engine or a model, checked against its files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cog_triton.artifact import engine_config, engine_manifest, engine_tar
from cog_triton.artifact.compatibility import gpu_problem
from cog_triton.artifact.engine_config import CONFIG_NAME, CPU_FAMILIES, TENSORRT_LLM, EngineConfig
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, SEALED_ENGINE, Manifest
from cog_triton.engines.tensorrt_llm import runtime_settings
from cog_triton.errors import BuildConfigInvalid, EngineCorrupt, InvalidArgument, ModelUnavailable
from cog_triton.sizing import model_files
from cog_triton.sizing.memory_sum import ModelShape
from cog_triton.sources.source import File, Source, no_engine

_MAX_SHOWN = 5
_OURS = (TENSORRT_LLM, *CPU_FAMILIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A complete engine, or a model; lengths in tokens. None, and no `sm`, means not recorded.

    An engine has a `manifest`, unless the original cog-triton made it, or a `config`, unless its
    family has none of ours; a model has neither, and no `engine`, but mostly a `shape`.
    """

    source: Source
    files: Mapping[str, File]
    manifest: Manifest | None = None
    manifest_sha256: str | None = None
    config: EngineConfig | None = None
    shape: ModelShape | None = None
    engine: str | None = None
    versions: Mapping[str, str]
    world_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_batch_size: int | None = None

    @property
    def sm(self) -> list[int]:
        """Compute capabilities that it was built for; 90 means 9.0."""
        return self.manifest.sm if self.manifest else []

    @property
    def longest_prompt(self) -> int | None:
        """Longest prompt in tokens that the engine takes without chunked context."""
        return self.config.longest_prompt(chunked=False) if self.config else self.max_input_len

    @property
    def on_cpu(self) -> bool:
        """Whether it needs no GPU."""
        return self.engine in CPU_FAMILIES

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def verified(self, name: str) -> bool:
        """Whether the file was read, and has a checksum in the manifest, which it matched."""
        listed = self.manifest is not None and name in self.manifest.files
        return listed and self.source.was_read(name)

    def gpu_problem(self, here: Sequence[int]) -> str | None:
        """Why the engine cannot run on GPUs of these SMs; None if it can.

        Raises:
            InvalidArgument: it is a model.
        """
        name = self.source.name
        if self.engine is None:
            raise InvalidArgument(
                f"--check-gpu: is for engines, and {name} is a model: run cog-triton doctor {name}"
            )
        if self.on_cpu:
            return None
        ranks = self.world_size or 1
        if self.engine == SEALED_ENGINE:  # which compiles where no seal fits
            return gpu_problem(name, (), ranks, 1, here)
        if not self.sm:
            why = "its manifest names none" if self.manifest else f"it has no {MANIFEST_NAME}"
            return f"{name}: the GPU that it was built for is not recorded: {why}"
        return gpu_problem(name, self.sm, ranks, 1, here)


def describe(source: Source, *, checksums: bool = True) -> Description:
    """Describe an engine, whose files are compared with its manifest, or a model.

    Args:
        checksums: whether files on this machine are read to compare their SHA-256, too.

    Raises:
        EngineCorrupt: a file is missing, or differs from the manifest, or the manifest and
            config.json disagree; names the file and the rule.
        ModelUnavailable: it cannot be had.
    """
    files = source.files(checksums=checksums)
    manifest = config = None
    name, text = source.name, source.read(MANIFEST_NAME)
    if not source.is_engine:
        return _model(source, files)
    if text is not None:
        manifest = engine_manifest.parse(text, f"{name}: {MANIFEST_NAME}")
        compare = engine_tar if source.kind in ("tar", "url") else engine_manifest
        if source.whole and (problems := compare.differences(manifest, files)):
            more = len(problems) - _MAX_SHOWN
            tail = f"; and {more} more" if more > 0 else ""
            raise EngineCorrupt(f"{name}: {'; '.join(problems[:_MAX_SHOWN])}{tail}")
    elif source.read(CONFIG_NAME) is None:
        raise EngineCorrupt(no_engine(source))
    if manifest is None or manifest.engine in _OURS:
        config = _config(source, files)
    if config is not None and config.engine == TENSORRT_LLM:
        runtime_settings.of_manifest(manifest, name)
    if manifest is not None and config is not None:
        _check_agreement(name, manifest, config)
    if manifest is None:
        assert config is not None
        limits = _limits(config)
        writer = TENSORRT_LLM if config.engine == TENSORRT_LLM else "cog_triton"
        return Description(
            source=source,
            files=files,
            config=config,
            engine=config.engine,
            versions={writer: config.version} if config.version else {},
            world_size=limits["world_size"],
            max_input_len=limits["max_input_len"],
            max_seq_len=limits["max_seq_len"],
            max_batch_size=limits["max_batch_size"],
        )
    assert text is not None
    return Description(
        source=source,
        files=files,
        manifest=manifest,
        manifest_sha256=hashlib.sha256(text).hexdigest(),
        config=config,
        engine=manifest.engine,
        versions=manifest.versions,
        world_size=manifest.world_size,
        max_input_len=manifest.max_input_len,
        max_seq_len=manifest.max_seq_len,
        max_batch_size=manifest.max_batch_size,
    )


def _model(source: Source, files: Mapping[str, File]) -> Description:
    try:
        shape = model_files.describe(source).shape
    except (BuildConfigInvalid, ModelUnavailable):  # a GGUF, or of an unusual architecture
        shape = None
    longest = shape.max_len if shape else None
    return Description(source=source, files=files, shape=shape, versions={}, max_seq_len=longest)


def _config(source: Source, files: Mapping[str, File]) -> EngineConfig:
    name, text = source.name, source.read(CONFIG_NAME)
    if text is None:
        raise EngineCorrupt(f"{name}: {CONFIG_NAME} is missing: every engine has one")
    config = engine_config.parse(text, f"{name}: {CONFIG_NAME}")
    if config.engine not in _OURS:
        raise EngineCorrupt(
            f"{name}: {CONFIG_NAME}: engine: {config.engine!r}: must be one of {', '.join(_OURS)}"
        )
    sizes = {file: found.size for file, found in files.items()}
    if source.whole and (problem := engine_config.missing_file(config, sizes)):
        raise EngineCorrupt(f"{name}: {problem}")
    return config


_LIMITS = ("world_size", "max_input_len", "max_seq_len", "max_batch_size")


def _limits(config: EngineConfig) -> dict[str, int]:
    limits = config.build_config
    lengths = (limits.max_input_len, limits.seq_len, limits.max_batch_size)
    return dict(zip(_LIMITS, (config.pretrained_config.mapping.ranks, *lengths), strict=True))


def _check_agreement(name: str, manifest: Manifest, config: EngineConfig) -> None:
    for key, found in {"engine": config.engine, **_limits(config)}.items():
        if (said := getattr(manifest, key)) != found:
            raise EngineCorrupt(
                f"{name}: {key}: {MANIFEST_NAME} says {said!r}, {CONFIG_NAME} {found!r}"
            )
