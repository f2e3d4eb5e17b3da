"""Compiler caches: one directory below which every compiler of a vLLM engine writes.

A start of vLLM 0.26 or 0.33 runs five compilers and more, each with a cache of its own in another
place. Triton's is the one that costs: where nobody sets TRITON_CACHE_DIR, torch points it into the
compiled model at the first start and nobody does at the second, which compiles all kernels again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = "VLLM_CACHE_ROOT"
PLAN = "VLLM_ENABLE_STARTUP_PLAN"
# None of them is a part of vLLM's hash of what is compiled (vllm/envs.py, compile_factors).
_DIRECTORIES = {
    ROOT: "vllm",  # compiled models, start-up plans, what is known of model classes
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # until vLLM sets its own, below its root
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "CUDA_CACHE_PATH": "cuda",  # the driver's, of PTX
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
    "MINFER_FMHA_CACHE_DIR": "fmha",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "OUTLINES_CACHE_DIR": "outlines",
}
_SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", PLAN: "1"}


def variables(root: Path) -> dict[str, str]:
    """Environment by which every compiler writes below `root`; to be set before vLLM is imported.

    It also has vLLM keep its start-up plan there, which spares the next start a measurement of
    memory and a capture of graphs. vLLM tells plans apart by its configuration, but neither by
    ``gpu_memory_utilization`` nor by the environment: engines that differ in these need a `root`
    each.
    """
    return {**{name: str(root / place) for name, place in _DIRECTORIES.items()}, **_SWITCHES}


def missing(root: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Those of `variables` that `environment` does not have: what a user has set, stays.

    There is no start-up plan in a VLLM_CACHE_ROOT of the user's, which is not one engine's alone,
    unless they ask for that, too.
    """
    left = {name: it for name, it in variables(root).items() if name not in environment}
    if ROOT in environment:
        left.pop(PLAN, None)
    return left
