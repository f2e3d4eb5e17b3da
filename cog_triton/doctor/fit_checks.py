"""Checks of an image, engine or model before it is fetched: does it fit here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cog_triton.artifact.compatibility import gpu_problem
from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.doctor import hardware, software, target
from cog_triton.doctor.report import Check, fail, ok, warn
from cog_triton.doctor.target import Target
from cog_triton.download.model_request import is_hub_id, json_object
from cog_triton.errors import CogTritonError, EngineIncompatible
from cog_triton.settings import Settings
from cog_triton.sizing import fit, gpu_table
from cog_triton.sizing.memory_sum import GIB
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.system import gpus
from cog_triton.system.host_memory import host_memory

_GB = 1e9
_SPARE = int(0.5 * _GB)


def is_model(name: str) -> bool:
    """Whether `name` is a hub id or a directory of Hugging Face weights, and no engine."""
    if is_hub_id(name):
        return True
    directory = Path(name)
    if (directory / MANIFEST_NAME).exists() or (directory / "model.json").exists():
        return False
    return "architectures" in json_object(directory / "config.json")


def check(target: Target) -> Check:
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
            return _on_the_cpu(files)
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


def _on_the_cpu(files: ModelFiles) -> Check:
    free = host_memory().free
    size = f"{files.name}: {files.weight_bytes / GIB:.1f} GiB of weights"
    told = f"{size}, {free / GIB:.1f} GiB of memory free, no GPU. {fit.would_do(files)}"
    if files.weight_bytes > free:
        return fail("model", told, "a machine with such a GPU, or a smaller model")
    if files.weight_bytes > free // 2:
        return warn(
            "model", told, "a smaller model, or such a GPU: there is little room for anything else"
        )
    return ok("model", f"{told}; the memory here holds it, too")


def run(name: str, settings: Settings, here: Sequence[int] | EngineIncompatible) -> Iterator[Check]:
    """Driver, GPU, memory and disk against `name`; of it only small files are fetched.

    `here` are the SMs of this machine's GPUs, or why they cannot be told.
    """
    lines: list[str] = []
    try:
        wanted = target.of(name, settings, lines.append)
    except CogTritonError as error:
        advice = "name an image, an engine or a model (ORG/NAME) that can be had"
        yield fail(_kind(name), str(error), advice)
        return
    if not wanted.on_cpu:
        yield _gpu(wanted, here)
        names = [] if isinstance(here, EngineIncompatible) else gpus.gpu_names()
        yield software.cuda_driver(wanted.cuda, wanted.what, names, compat=wanted.compat)
    if not isinstance(here, EngineIncompatible):
        yield check(wanted)
    yield disk(wanted)


def _kind(name: str) -> str:
    return "model" if is_model(name) else "engine"


def _gpu(wanted: Target, here: Sequence[int] | EngineIncompatible) -> Check:
    if wanted.what != "engine" or isinstance(here, EngineIncompatible):
        return hardware.gpu(wanted.sm, here)
    sms = [int(sm) for sm in wanted.sm.split(",")] if wanted.sm else []
    if problem := gpu_problem(wanted.name, sms, wanted.gpus or 1, 1, here):
        return fail("GPU", problem, "serve it on the machine that it is for")
    return hardware.gpu(None, here)


def disk(wanted: Target, usage: Callable[[Path], int] | None = None) -> Check:
    """Check the disk for what is to be fetched, and for its unpacking."""
    free_of = usage or (lambda path: shutil.disk_usage(path).free)
    place = next(path for path in (wanted.place, *wanted.place.parents) if path.exists())
    free, unpacked = free_of(place), wanted.unpacked
    needed = wanted.pull + (wanted.pull if unpacked is None else unpacked) + _SPARE
    found = f"{free / _GB:.1f} GB free at {place}; {wanted.pull / _GB:.1f} GB to fetch, " + (
        "unpacked at least as much: compressed layers do not tell"
        if unpacked is None
        else f"{unpacked / _GB:.1f} GB unpacked"
    )
    if free < needed:
        setting = (
            "the data root of the container engine"
            if wanted.what == "image"
            else ("COG_TRITON_WORK_DIR, or HF_HOME for a model,")
        )
        advice = f"free {(needed - free) / _GB:.1f} GB, or set {setting} to a larger disk"
        return fail("disk for it", found, advice)
    return ok("disk for it", found)
