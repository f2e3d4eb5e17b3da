"""Check of a model that is no engine yet: does it fit this machine, and what would it fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.doctor.check_result import Check, fail, ok, warn
from cog_triton.download.model_source import is_hub_id
from cog_triton.errors import CogTritonError, EngineIncompatible
from cog_triton.sizing import fit, gpu_table, this_machine
from cog_triton.sizing.memory_sum import GIB
from cog_triton.sizing.model_files import ModelFiles, describe


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


def check(name: str, meminfo: Path = Path("/proc/meminfo")) -> Check:
    """Check the model `name` against this machine's GPUs, or its memory if it has none."""
    try:
        files = describe(name)
        here = this_machine.gpu()
        if here is None:
            return _on_the_cpu(files, meminfo)
        gpu, count = here
        gpu_table.require_supported(gpu)
        counts = [number for number in gpu_table.COUNTS if number <= count]
        found = fit.choose(files, gpu, counts, fit.precisions_of(files, gpu))
    except EngineIncompatible as error:
        return fail("model", error.detail, "another GPU, more of them, or a smaller model")
    except CogTritonError as error:
        return fail("model", str(error), "name a Hugging Face model (ORG/NAME) or its directory")
    memory = found.memory
    return ok(
        "model",
        f"{files.name} fits {memory.gpus} of {count} x {gpu.name} with {memory.precision.title}:"
        f" {found.max_batch_size} sequences at once, {memory.kv_tokens} tokens in the KV cache",
    )


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
