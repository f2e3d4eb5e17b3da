"""Checks of an image, engine or model before it is fetched: does it fit this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cog_triton.artifact.compatibility import gpu_problem
from cog_triton.doctor import hardware, model_check, software, target
from cog_triton.doctor.check_result import Check, fail, ok
from cog_triton.doctor.target import Target
from cog_triton.errors import CogTritonError, EngineIncompatible
from cog_triton.settings import Settings
from cog_triton.system import gpus

_GB = 1e9
_SPARE = int(0.5 * _GB)


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
        yield model_check.check(wanted)
    yield disk(wanted)


def _kind(name: str) -> str:
    return "model" if model_check.is_model(name) else "engine"


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
