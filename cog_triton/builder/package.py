"""The engine of a build: its directory, with tokenizer, build config and manifest, and its tar."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cog_triton import __version__
from cog_triton.artifact import engine_config, engine_manifest, engine_tar, tar_members
from cog_triton.artifact.canary import CANARY_NAME, Canary
from cog_triton.artifact.engine_config import TENSORRT_LLM, EngineConfig
from cog_triton.artifact.engine_manifest import BUILD_CONFIG, MANIFEST_NAME, FileEntry, Manifest
from cog_triton.builder import canary_run, packed_adapters
from cog_triton.builder.config import BuildConfig, SourceConfig
from cog_triton.builder.packed_adapters import PackedAdapter
from cog_triton.builder.workspace import Echo, link_or_copy
from cog_triton.download.model_request import FetchedModel
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.tensorrt_llm.engine_directory import Engine
from cog_triton.engines.tensorrt_llm.runtime_settings import carried
from cog_triton.engines.vllm import sealed_caches
from cog_triton.errors import BuildConfigInvalid, BuildStepFailed, EngineCorrupt, InvalidArgument
from cog_triton.settings import load_group
from cog_triton.settings.programs import BuilderSettings, FileSettings
from cog_triton.system.gpus import gpu_names, visible_gpus
from cog_triton.system.isolated_python import environment_of

ENGINE = "engine"
"""The last stage of a build, and the engine's directory in its output."""
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
_SAID_EVERY_S = 3.0  # below terminal_progress.QUIET_S, whose line says no share

# Distributions that an engine family is built with, each by the names it had, newest first.
_DISTRIBUTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    TENSORRT_LLM: {
        "tensorrt_llm": ("tensorrt-llm",),
        "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    },
    OpenVINOFamily.name: {"openvino": ("openvino",), "openvino_genai": ("openvino-genai",)},
}
# Variables of NVIDIA's images for versions that no Python package tells.
_VARIABLES = {"tensorrt": "TRT_VERSION", "cuda": "CUDA_VERSION"}
_PRINT_VERSIONS = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print("\\n" + json.dumps(found))
"""
_TIMEOUT_S = 120
_CANARY_TIMEOUT_S = 600


def check(output: Path, echo: Echo) -> None:
    """Check, before a build, that an engine.tar can be written to `output`.

    `echo` gets a line if its directory is yet to be made.

    Raises:
        InvalidArgument: its suffix is no tar's, it is a directory, or it lies where none can be
            written.
    """
    tar_members.by_name(output)
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


def lay_out(
    config: BuildConfig,
    built: Path,
    model: FetchedModel,
    root: Path,
    *,
    adapters: Sequence[PackedAdapter] = (),
    echo: Echo,
) -> None:
    """Make the engine's directory in `root`: what was built, tokenizer, adapters, build config.

    Args:
        built: the directory that the last step wrote; its files are linked.
        model: tokenizer files are taken from it that `built` lacks.
        adapters: LoRA adapters to pack with it.
        echo: gets progress and warnings, a line each.

    Raises:
        BuildConfigInvalid: the engine cannot be served with what `config` says of that.
        BuildStepFailed: the engine has no usable config.json, or not the files that it asks for.
        EngineIncompatible: NVIDIA's driver does not work, or an adapter does not fit.
    """
    described = _read_config(built)
    files = engine_manifest.files_of(built)
    files.pop(MANIFEST_NAME, None)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    problem = engine_config.missing_file(described, sizes)
    ranks = described.pretrained_config.mapping.ranks
    if not problem and config.world_size not in (None, ranks):
        problem = (
            f"the engine has {ranks} ranks, the build config's world_size is {config.world_size}"
        )
    if problem:
        raise BuildStepFailed(f"{built}: {problem}")
    tokenizer = _tokenizer(described, model.path)
    if "tokenizer.json" not in {*tokenizer, *files}:
        echo("[engine] warning: neither engine nor model has tokenizer.json, which a runner needs")
    runtime = {} if config.runtime is None else carried(config.runtime)
    if runtime:
        _check_settings(runtime, described, built)
    if adapters:
        packed_adapters.check_built(adapters, described, built)
    engine = root / ENGINE
    for name, path in files.items():
        (engine / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(path, engine / name)
    for name in tokenizer.keys() - files.keys():
        shutil.copyfile(tokenizer[name], engine / name)
    for each in adapters:
        each.write(engine)
    made = canary_of(described.engine, engine, echo)
    sm, gpu_name = _gpus(described, echo)
    limits = described.build_config
    finish(
        engine,
        config,
        made,
        Manifest(
            schema=2 if runtime or adapters else 1,
            engine=described.engine,
            model_id=config.model_id,
            revision=model.revision,
            sm=sm,
            gpu_name=gpu_name,
            versions=dict(sorted(_versions(described, echo).items())),
            world_size=ranks,
            max_input_len=limits.max_input_len,
            max_seq_len=limits.seq_len,
            max_batch_size=limits.max_batch_size,
            runtime=runtime,
            lora_adapters={each.name: each.entry for each in adapters},
            files={},
        ),
    )


def finish(engine: Path, config: SourceConfig, canary: Canary | None, manifest: Manifest) -> None:
    """Write the last files of an engine's directory; its manifest gets the sums of all."""
    text = config.to_yaml().encode()
    last = {BUILD_CONFIG: text}
    if canary is not None:
        last[CANARY_NAME] = canary.to_json().encode()
    for name, content in last.items():
        (engine / name).unlink(missing_ok=True)  # a link to a file of this name
        (engine / name).write_bytes(content)
    files = {name: entry_of(path) for name, path in engine_manifest.files_of(engine).items()}
    update = {"files": files, "config_sha256": hashlib.sha256(text).hexdigest()}
    (engine / MANIFEST_NAME).write_text(manifest.model_copy(update=update).to_json(), "utf-8")


def entry_of(path: Path) -> FileEntry:
    """Size and sum of a file."""
    return FileEntry(size=path.stat().st_size, sha256=engine_manifest.sha256_of(path))


def pack(engine: Path, output: Path, echo: Echo) -> None:
    """Pack an engine's directory into `output`; a sealed engine is trusted on this host then.

    Raises:
        InvalidArgument: `output` has another suffix than a tar's.
        DiskFull: there is no room for it.
        BuildStepFailed: a file is not what the manifest says.
    """
    echo(f"[package] {output}")
    members = engine_manifest.files_of(engine)
    members.pop(MANIFEST_NAME)
    manifest = engine_manifest.load(engine)
    assert manifest is not None

    def describe(entries: dict[str, FileEntry]) -> Manifest:
        for difference in engine_manifest.differences(manifest, entries):
            raise BuildStepFailed(f"{engine}: {difference}")
        return manifest

    total = sum(map(engine_tar.size_of, members.values()))
    engine_tar.pack(members, output, describe, TarProgress(total, echo))
    if manifest.seals:
        digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()
        sealed_caches.remember(load_group(FileSettings).work_dir, digest)
        names = ", ".join(manifest.seals)
        echo(f"[package] sealed for {names}; elsewhere than on this host:")
        echo(f"[package] SEAL_SHA256={digest}")


def canary_of(family: str, engine_dir: Path, echo: Echo) -> Canary | None:
    """Canary of the engine at `engine_dir`; None, with a line to `echo`, if it cannot run here.

    An engine without one is served all the same.
    """
    if family not in canary_run.ENGINES:
        return None
    program = ["-m", "cog_triton.builder.canary_run", family, str(engine_dir.resolve())]
    try:
        return Canary.model_validate_json(_ask(program, "the canary", _CANARY_TIMEOUT_S))
    except (BuildStepFailed, ValidationError) as error:
        lines = str(error).strip().splitlines()
        echo(f"[engine] warning: no canary, as the engine does not answer here: {lines[-1]}")
        return None


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


class TarProgress:
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


def _check_settings(given: Mapping[str, Any], built: EngineConfig, directory: Path) -> None:
    """Check what a config's `runtime` has against the engine in `directory`, whose config.json is
    `built`: a mistake costs no build, as the engine stays in the step cache.

    Raises:
        BuildConfigInvalid: names every setting that this engine cannot be served with.
    """
    problems = [
        f"runtime.{name}: {given[name]!r}: {rule}"
        for name, rule in model_settings.problems(given, Engine(directory, built))
    ]
    if problems:
        raise BuildConfigInvalid("\n".join(problems))


def _versions(config: EngineConfig, echo: Echo) -> dict[str, str]:
    """Versions that the engine of `config` was built with, as far as they are known.

    TensorRT-LLM's is the engine's own, if that has it; `echo` is told if another one is installed.

    Raises:
        BuildStepFailed: the Python of the steps does not answer.
    """
    wanted = _DISTRIBUTIONS.get(config.engine, {})
    installed = _installed([name for names in wanted.values() for name in names])
    found = {"cog_triton": __version__}
    for key, names in wanted.items():
        found_versions = [installed[name] for name in names if name in installed]
        found_versions += filter(None, [os.environ.get(_VARIABLES.get(key, ""))])
        if found_versions:
            found[key] = found_versions[0]
    if config.engine == TENSORRT_LLM and config.version:
        here = found.get(TENSORRT_LLM, config.version)
        if here != config.version:
            echo(
                f"[engine] warning: the engine is of TensorRT-LLM {config.version}, the Python of"
                f" the steps has {here}"
            )
        found[TENSORRT_LLM] = config.version
    return found


def _gpus(config: EngineConfig, echo: Echo) -> tuple[list[int], str | None]:
    """Compute capabilities of the GPUs here, without repetition, and their names.

    Those are what an engine is built for, unless its family needs none: ``[]``, None.

    Raises:
        EngineIncompatible: there is a driver that does not work.
    """
    if config.on_cpu:
        return [], None
    sms = sorted(set(visible_gpus()))
    if not sms:
        echo("[engine] warning: no GPU here: the manifest cannot say which one the engine is for")
    return sms, ", ".join(sorted(set(gpu_names()))) or None


def _installed(names: list[str]) -> dict[str, str]:
    """Versions of those of `names` that are installed in the Python of the steps."""
    line = _ask(["-c", _PRINT_VERSIONS, *names], "its packages' versions", _TIMEOUT_S)
    try:
        found: dict[str, str | None] = json.loads(line)
    except ValueError as error:
        raise BuildStepFailed(f"the Python of the steps tells no versions: {line!r}") from error
    return {name: version for name, version in found.items() if version}


def _ask(arguments: list[str], what: str, timeout: float) -> str:
    """The last line that the Python of the steps prints, run with `arguments`.

    Raises:
        BuildStepFailed: it ended with an error, or not within `timeout` seconds; says that it does
            not tell `what`, and its stderr.
    """
    python = str(load_group(BuilderSettings).cog_triton_step_python or sys.executable)
    with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
        try:
            done = subprocess.run(
                [python, *arguments],
                env=environment_of(python, Path(scratch)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=True,
            )
            return done.stdout.splitlines()[-1]
        except (OSError, IndexError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or ""
            raise BuildStepFailed(
                f"{python} does not tell {what}: {error} {told}".rstrip()
            ) from error
