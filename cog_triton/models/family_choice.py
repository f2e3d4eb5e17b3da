"""Choice of the engine family for a model, by what this machine has and vLLM knows."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.artifact import cuda_support
from cog_triton.errors import (
    EngineIncompatible,
    InvalidArgument,
    MissingExtra,
    nearest,
)
from cog_triton.packages.vllm_environment import VLLMInstallation as VLLMInstallation
from cog_triton.packages.vllm_environment import find_vllm as find_vllm
from cog_triton.sources.source import Source
from cog_triton.system.gpus import visible_gpus

FAMILIES = ("openvino", "vllm", "tensorrt_llm")
SETUP = "cog-triton setup vllm"
_REGISTRY = "vllm/model_executor/models/registry.py"
_GENERATING = (
    "_TEXT_GENERATION_MODELS",
    "_MULTIMODAL_MODELS",
    "_TRANSFORMERS_SUPPORTED_MODELS",
    "_TRANSFORMERS_BACKEND_MODELS",
)


@dataclass(frozen=True)
class FamilyChoice:
    """The family that serves a model, why, and what it would take to have another."""

    family: str
    why: str
    otherwise: str
    vllm: VLLMInstallation | None = None


def choose(
    source: Source, forced: str | None, work_dir: Path, *, on_cpu: bool = False
) -> FamilyChoice:
    """The family for a model that is no engine yet; `forced` is the user's own choice.

    In an image for the CPU, `on_cpu`, GPUs are not looked for.

    Raises:
        InvalidArgument: `forced` is no family, or takes no such model.
        MissingExtra: `forced` is not installed.
        EngineIncompatible: `forced` does not run on this machine.
    """
    if forced == "tensorrt_llm":
        raise InvalidArgument(
            f"--family tensorrt_llm: serves engines, and {source.name} is none: write a build"
            " config (configs/build), run cog-triton build CONFIG, and serve its engine.tar"
        )
    if forced not in (None, *FAMILIES):
        raise InvalidArgument(f"--family {forced!r}: must be one of {', '.join(FAMILIES)}")
    if source.kind in ("file", "package"):  # which needs no GPU, be its driver as it may
        if forced == "vllm":
            raise InvalidArgument(
                f"--family vllm: {source.name} is a GGUF file, which only openvino takes here: name"
                " the Hugging Face model that it was made of"
            )
        return FamilyChoice("openvino", "it takes GGUF files", "for vllm: name safetensors")
    if forced == "openvino":
        return FamilyChoice("openvino", "--family says so", "without that: by machine")
    gpus, vllm = [] if on_cpu else visible_gpus(), find_vllm(work_dir)
    if forced == "vllm" and not gpus:
        raise EngineIncompatible("--family vllm: this machine has no NVIDIA GPU that CUDA can see")
    if forced == "vllm" and vllm is None:
        raise MissingExtra(f"--family vllm: vLLM is not set up here: run {SETUP}")
    if not gpus:
        return FamilyChoice("openvino", "this machine has no GPU", f"for vllm: a GPU, and {SETUP}")
    if vllm is None:
        return FamilyChoice("openvino", "vLLM is not set up here", f"for the GPU: {SETUP}")
    cuda_support.require_packages([str(vllm.site)], f"vLLM in {vllm.site}")
    why = "--family says so" if forced else "this machine has a GPU and vLLM"
    return FamilyChoice("vllm", why, "for the CPU: --family openvino", vllm)


def require_architecture(config: Mapping[str, Any], site: Path, name: str) -> None:
    """Refuse a model that vLLM in the site-packages `site` cannot serve; `config` is config.json.

    vLLM also takes what its Transformers knows. If its registry cannot be read, vLLM itself
    refuses, after the download.

    Raises:
        EngineIncompatible: names the architecture, and the nearest that there is.
    """
    tables = _tables(site / _REGISTRY)
    known = {name for table in _GENERATING for name in tables.get(table, ())}
    named = config.get("architectures")
    wanted = [str(one) for one in named] if isinstance(named, list) else []
    if not known or any(one in known for one in wanted):
        return
    shown = ", ".join(wanted) or "none"
    for table, others in tables.items():
        if {*others} & {*wanted}:
            raise EngineIncompatible(f"{name}: {shown}: vLLM has it in {table.strip('_')} only")
    kind = str(config.get("model_type") or "").replace("-", "_")
    if wanted and kind.isidentifier() and (site / "transformers" / "models" / kind).is_dir():
        return
    close = nearest(wanted[0], sorted(known)) if wanted else ""
    raise EngineIncompatible(
        f"{name}: architectures {shown}: neither vLLM's registry nor Transformers has it{close}"
    )


def _tables(path: Path) -> dict[str, Sequence[str]]:
    """Keys of the dictionaries at the top of vLLM's registry, by name; empty if it is another."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, Sequence[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [k.value for k in node.value.keys if isinstance(k, ast.Constant)]
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = [str(key) for key in keys]
    return found
