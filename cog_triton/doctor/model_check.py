"""Memory of a model or engine: does it fit this machine's GPUs, and what would it fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.doctor.check_result import Check, fail, ok, warn
from cog_triton.doctor.target import Target
from cog_triton.download.model_source import is_hub_id
from cog_triton.errors import EngineIncompatible
from cog_triton.sizing import fit, gpu_table
from cog_triton.sizing.memory_sum import GIB
from cog_triton.sizing.model_files import ModelFiles


def is_model(name: str) -> bool:
    """Whether `name` is a hub id or a directory of Hugging Face weights, and no engine."""
    if is_hub_id(name):
        return True
    directory = Path(name)
    if (directory / MANIFEST_NAME).exists() or (directory / "model.json").exists():
        return False
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "architectures" in config


def check(target: Target, meminfo: Path = Path("/proc/meminfo")) -> Check:
    """Check weights, KV cache and activations against the GPUs' free memory; memory without GPU."""
    files = target.files
    if files is None:
        found, name = f"not compared: {target.unknown}", "memory of the GPU"
        if target.what == "image" or target.on_cpu:
            return ok(name, found)
        return warn(name, found, "the engine's log tells what it takes, once it has loaded")
    try:
        here = gpu_table.gpu_here()
        if here is None:
            return _on_the_cpu(files, meminfo)
        gpu, count = here
        gpu_table.require_supported(gpu)
        counts = [target.gpus] if target.gpus else [n for n in gpu_table.COUNTS if n <= count]
        precisions = [target.precision] if target.precision else fit.precisions_of(files, gpu)
        best = fit.choose(files, gpu, counts, precisions)
    except EngineIncompatible as error:
        return fail(target.what, error.detail, "another GPU, more of them, or a smaller model")
    memory = best.memory
    told = (
        f"{files.name} fits {memory.gpus} of {count} x {gpu.name} with {memory.precision.title}:"
        f" {best.max_batch_size} sequences at once, {memory.kv_tokens} tokens in the KV cache;"
        f" the largest max_model_len is {min(best.longest, files.shape.max_len)}"
    )
    if gpu.free is None:
        return ok(target.what, f"{told} (what is free of the GPU's memory is not known)")
    if memory.usable < gpu.free:
        return ok(target.what, told)
    share = gpu.free * 100 // gpu.memory / 100
    taken = f"{told}; others hold {(gpu.memory - gpu.free) / GIB:.1f} GiB of the GPU"
    return warn(target.what, taken, f"end them, or set gpu_memory_utilization to {share}")


def _on_the_cpu(files: ModelFiles, meminfo: Path) -> Check:
    free = int(re.findall(r"MemAvailable: *(\d+)", meminfo.read_text("utf-8"))[0]) * 1024
    size = f"{files.name}: {files.weight_bytes / GIB:.1f} GiB of weights"
    told = f"{size}, {free / GIB:.1f} GiB of memory free, no GPU. {fit.would_do(files)}"
    if files.weight_bytes > free:
        return fail("model", told, "a machine with such a GPU, or a smaller model")
    if files.weight_bytes > free // 2:
        return warn(
            "model", told, "a smaller model, or such a GPU: there is little room for anything else"
        )
    return ok("model", f"{told}; the memory here holds it, too")
