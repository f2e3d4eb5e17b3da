"""Engine description: read from manifest and config.json, and checked against the files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cog_triton.artifact import engine_config, engine_manifest, engine_tar
from cog_triton.artifact.compatibility import gpu_problem
from cog_triton.artifact.engine_config import CONFIG_NAME, CPU_FAMILIES, TENSORRT_LLM, EngineConfig
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, SEALED_ENGINE, Manifest
from cog_triton.engines.tensorrt_llm import runtime_settings
from cog_triton.errors import EngineCorrupt
from cog_triton.inspection.engine_contents import EngineContents, no_engine

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """Description of a complete engine; lengths in tokens. None, and no `sm`, means not recorded.

    `manifest` and `config` are its sources; the first is None for a tar made by the original
    cog-triton, the second for a family that has no config.json of ours.
    """

    contents: EngineContents
    manifest: Manifest | None
    config: EngineConfig | None
    engine: str
    versions: dict[str, str]
    world_size: int
    max_input_len: int
    max_seq_len: int
    max_batch_size: int

    @property
    def sm(self) -> list[int]:
        """Compute capabilities that it was built for; 90 means 9.0."""
        return self.manifest.sm if self.manifest else []

    @property
    def longest_prompt(self) -> int:
        """Longest prompt in tokens that the engine takes without chunked context."""
        if self.config is None:
            return self.max_input_len
        return self.config.longest_prompt(chunked=False)

    @property
    def on_cpu(self) -> bool:
        """Whether it needs no GPU."""
        return self.engine in CPU_FAMILIES

    @property
    def manifest_sha256(self) -> str | None:
        """Digest of the manifest, by which its compiled code is pinned (SEAL_SHA256)."""
        text = self.contents.texts.get(MANIFEST_NAME)
        return None if text is None else hashlib.sha256(text).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.contents.files.values())

    def verified(self, name: str) -> bool:
        """Whether the file was read, and has a checksum in the manifest, which it matched."""
        listed = self.manifest is not None and name in self.manifest.files
        return listed and self.contents.was_read(name)


def describe(contents: EngineContents) -> EngineDescription:
    """Describe the engine in `contents`.

    Raises:
        EngineCorrupt: a file is missing, or differs from the manifest, or the manifest and
            config.json disagree; names the file and the rule.
    """
    path = contents.path
    manifest = config = None
    if MANIFEST_NAME in contents.texts:
        manifest = engine_manifest.parse(contents.texts[MANIFEST_NAME], f"{path}: {MANIFEST_NAME}")
        _check_manifest(contents, manifest)
    elif CONFIG_NAME not in contents.texts:
        raise EngineCorrupt(no_engine(path, contents.files))
    if manifest is None or manifest.engine in (TENSORRT_LLM, *CPU_FAMILIES):
        config = _config(contents)
        _check_files(contents, config)
    if config is not None and config.engine == TENSORRT_LLM:
        runtime_settings.of_manifest(manifest, str(path))
    if manifest is not None:
        if config is not None:
            _check_agreement(contents, manifest, config)
        return EngineDescription(
            contents=contents,
            manifest=manifest,
            config=config,
            engine=manifest.engine,
            versions=manifest.versions,
            world_size=manifest.world_size,
            max_input_len=manifest.max_input_len,
            max_seq_len=manifest.max_seq_len,
            max_batch_size=manifest.max_batch_size,
        )
    assert config is not None
    writer = TENSORRT_LLM if config.engine == TENSORRT_LLM else "cog_triton"
    return EngineDescription(
        contents=contents,
        manifest=None,
        config=config,
        engine=config.engine,
        versions={writer: config.version} if config.version else {},
        world_size=config.pretrained_config.mapping.ranks,
        max_input_len=config.build_config.max_input_len,
        max_seq_len=config.build_config.seq_len,
        max_batch_size=config.build_config.max_batch_size,
    )


def _config(contents: EngineContents) -> EngineConfig:
    if CONFIG_NAME not in contents.texts:
        raise EngineCorrupt(f"{contents.path}: {CONFIG_NAME} is missing: every engine has one")
    config = engine_config.parse(contents.texts[CONFIG_NAME], f"{contents.path}: {CONFIG_NAME}")
    known = (TENSORRT_LLM, *CPU_FAMILIES)
    if config.engine not in known:
        raise EngineCorrupt(
            f"{contents.path}: {CONFIG_NAME}: engine: {config.engine!r}:"
            f" must be one of {', '.join(known)}"
        )
    return config


def _check_manifest(contents: EngineContents, manifest: Manifest) -> None:
    """Check files against the manifest; only a directory may hold others, such as caches."""
    compare = engine_tar if contents.kind == "tar" else engine_manifest
    problems = compare.differences(manifest, contents.files)
    if problems:
        more = len(problems) - _MAX_SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        raise EngineCorrupt(f"{contents.path}: {'; '.join(problems[:_MAX_SHOWN])}{tail}")


def _check_files(contents: EngineContents, config: EngineConfig) -> None:
    sizes = {name: entry.size for name, entry in contents.files.items()}
    problem = engine_config.missing_file(config, sizes)
    if problem:
        raise EngineCorrupt(f"{contents.path}: {problem}")


def _check_agreement(contents: EngineContents, manifest: Manifest, config: EngineConfig) -> None:
    limits = config.build_config
    for key, said, found in (
        ("engine", manifest.engine, config.engine),
        ("world_size", manifest.world_size, config.pretrained_config.mapping.ranks),
        ("max_input_len", manifest.max_input_len, limits.max_input_len),
        ("max_seq_len", manifest.max_seq_len, limits.seq_len),
        ("max_batch_size", manifest.max_batch_size, limits.max_batch_size),
    ):
        if said != found:
            raise EngineCorrupt(
                f"{contents.path}: {key}: {MANIFEST_NAME} says {said!r}, {CONFIG_NAME} {found!r}"
            )


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """Result: SM of each GPU `here`; `problem` is why the engine cannot run, None if it can."""

    here: tuple[int, ...]
    problem: str | None


def check_gpus(engine: EngineDescription, here: Sequence[int]) -> GpuCheck:
    """Compare the engine's needs with `here`, the result of `system.gpus.visible_gpus`."""
    return GpuCheck(tuple(here), _problem(engine, here))


def _problem(engine: EngineDescription, here: Sequence[int]) -> str | None:
    if engine.on_cpu:
        return None
    path = engine.contents.path
    if engine.engine == SEALED_ENGINE:  # which compiles where no seal fits
        return gpu_problem(str(path), (), engine.world_size, 1, here)
    if not engine.sm:
        why = "its manifest names none" if engine.manifest else f"it has no {MANIFEST_NAME}"
        return f"{path}: the GPU that it was built for is not recorded: {why}"
    return gpu_problem(str(path), engine.sm, engine.world_size, 1, here)
