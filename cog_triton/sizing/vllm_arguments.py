"""First model.json of a model for vLLM, with the reason of every argument."""

from __future__ import annotations

import json

from cog_triton.errors import EngineIncompatible
from cog_triton.sizing.fit import Fit
from cog_triton.sizing.memory_sum import FP8, INT4_AWQ, INT8, Precision
from cog_triton.sizing.model_files import ModelFiles

VLLM_PRECISIONS = (FP8,)
"""What vLLM makes of 16-bit weights while it loads them; others need quantized weights."""


def vllm_arguments(files: ModelFiles, fit: Fit) -> dict[str, tuple[object, str]]:
    """Engine arguments by name, each with its reason."""
    memory = fit.memory
    _require_possible(files, memory.precision)
    found: dict[str, tuple[object, str]] = {"model": (files.name, "directory or hub id")}
    if files.commit is not None:
        found["revision"] = (files.commit, "of the day on which this was written")
    if memory.gpus > 1:
        found["tensor_parallel_size"] = (memory.gpus, "each GPU has a part of every layer")
    if memory.precision is FP8:
        found["quantization"] = ("fp8", "half the memory of 16 bits; made while loading")
        found["kv_cache_dtype"] = ("fp8", "half the memory of 16 bits a token")
    found["max_model_len"] = (fit.max_seq_len, "prompt and answer; the KV cache holds two of them")
    found["max_num_seqs"] = (fit.max_batch_size, "sequences that run at once; others wait")
    return found


def as_json(arguments: dict[str, tuple[object, str]]) -> str:
    """Text of model.json."""
    return json.dumps({name: value for name, (value, _) in arguments.items()}, indent=2) + "\n"


def _require_possible(files: ModelFiles, precision: Precision) -> None:
    if precision in (INT8, INT4_AWQ):
        raise EngineIncompatible(
            f"{files.name}: {precision.title}: vLLM does not make them of 16-bit weights: name a"
            " model whose weights are quantized so already"
        )
