"""Provenance of an engine: versions that it was built with and GPUs that it was built for.

They come from the driver, the Python of the build's steps, and the engine's own config.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from cog_triton import __version__
from cog_triton.artifact.engine_config import TENSORRT_LLM, EngineConfig
from cog_triton.builder import step_python
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.errors import BuildStepFailed
from cog_triton.system.gpus import gpu_names, visible_gpus

Echo = Callable[[str], None]

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


def versions(config: EngineConfig, echo: Echo) -> dict[str, str]:
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
                f"[package] warning: the engine is of TensorRT-LLM {config.version}, the Python of"
                f" the steps has {here}"
            )
        found[TENSORRT_LLM] = config.version
    return found


def gpus(config: EngineConfig, echo: Echo) -> tuple[list[int], str | None]:
    """Compute capabilities of the GPUs here, without repetition, and their names.

    Those are what an engine is built for, unless its family needs none: ``[]``, None.

    Raises:
        EngineIncompatible: there is a driver that does not work.
    """
    if config.on_cpu:
        return [], None
    sms = sorted(set(visible_gpus()))
    if not sms:
        echo("[package] warning: no GPU here: the manifest cannot say which one the engine is for")
    return sms, ", ".join(sorted(set(gpu_names()))) or None


def _installed(names: list[str]) -> dict[str, str]:
    """Versions of those of `names` that are installed in the Python of the steps."""
    line = step_python.ask(["-c", _PRINT_VERSIONS, *names], "its packages' versions", _TIMEOUT_S)
    try:
        found: dict[str, str | None] = json.loads(line)
    except ValueError as error:
        raise BuildStepFailed(f"the Python of the steps tells no versions: {line!r}") from error
    return {name: version for name, version in found.items() if version}
