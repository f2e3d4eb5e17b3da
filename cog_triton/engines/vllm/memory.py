"""Memory of a vLLM engine, by its arguments and the files of its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cog_triton.errors import ModelUnavailable
from cog_triton.sizing.demand import Demand
from cog_triton.sizing.memory_sum import AS_STORED, FP8
from cog_triton.sizing.model_files import ModelFiles

# vllm/config/cache.py; a share of a GPU's memory.
MEMORY_SHARE = 0.92
_UNKNOWN_SIZES = (
    *("cpu_offload_gb", "enable_expert_parallel", "hf_overrides", "kv_transfer_config"),
    *("offload_backend", "offload_group_size", "offload_params", "language_model_only"),
    *("hf_config_path", "quantization_config"),
)


def demand_of(files: ModelFiles, arguments: Mapping[str, Any]) -> Demand:
    """What vLLM asks of its GPUs for a model; raises E1304 for what cannot be summed."""
    given = [name for name in _UNKNOWN_SIZES if arguments.get(name)]
    if 0 in (arguments.get("limit_mm_per_prompt") or {}).values():  # an encoder is not loaded
        given.append("limit_mm_per_prompt")
    if given:
        raise ModelUnavailable(f"{files.name}: {given[0]} is given")
    method = arguments.get("quantization")
    if method not in (None, "fp8", files.shape.quantized):
        raise ModelUnavailable(f"{files.name}: quantization is {method}")
    precision = FP8 if method == "fp8" and files.shape.quantized is None else AS_STORED
    kv = 1 if str(arguments.get("kv_cache_dtype", "")).startswith("fp8") else 2
    title = f"{precision.title.split(' ', 1)[0]} weights" if method else "weights as stored"
    precision = dataclasses.replace(precision, kv=kv, title=f"{title}, {8 * kv}-bit KV cache")
    if files.shape.quantized is None:  # vLLM halves 32 bits, and reads one of several copies
        most = 2 * files.shape.parameters
        files = dataclasses.replace(files, weight_bytes=min(files.weight_bytes, most))
    spread = [arguments.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline")]
    absolute = arguments.get("kv_cache_memory_bytes")
    return Demand(
        files=files,
        gpus=int(spread[0]) * int(spread[1]),
        precision=precision,
        share=1.0 if absolute else arguments.get("gpu_memory_utilization") or MEMORY_SHARE,
        utilization=None if absolute else "gpu_memory_utilization in model.json",
    )
