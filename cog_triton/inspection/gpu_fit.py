"""Whether an engine fits the GPUs that are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cog_triton.artifact.compatibility import gpu_problem
from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.inspection.description import Description


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """SM of each GPU here, and why the engine cannot run on them, None if it can."""

    here: tuple[int, ...]
    problem: str | None


def check(engine: Description, here: Sequence[int]) -> GpuCheck:
    """Compare what the engine was built for with `here`, as `preflight.visible_gpus` gives it."""
    return GpuCheck(tuple(here), _problem(engine, here))


def _problem(engine: Description, here: Sequence[int]) -> str | None:
    if engine.on_cpu:
        return None
    path = engine.contents.path
    if not engine.sm:
        why = "its manifest names none" if engine.manifest else f"it has no {MANIFEST_NAME}"
        return f"{path}: the GPU that it was built for is not recorded: {why}"
    return gpu_problem(path, engine.sm, engine.world_size, 1, here)
