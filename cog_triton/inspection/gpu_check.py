"""GPU check: whether an engine can run on this machine's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cog_triton.artifact.compatibility import gpu_problem
from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.inspection.engine_description import EngineDescription


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """Result: SM of each GPU `here`; `problem` is why the engine cannot run, None if it can."""

    here: tuple[int, ...]
    problem: str | None


def check(engine: EngineDescription, here: Sequence[int]) -> GpuCheck:
    """Compare the engine's needs with `here`, the result of `system.gpus.visible_gpus`."""
    return GpuCheck(tuple(here), _problem(engine, here))


def _problem(engine: EngineDescription, here: Sequence[int]) -> str | None:
    if engine.on_cpu:
        return None
    path = engine.contents.path
    if not engine.sm:
        why = "its manifest names none" if engine.manifest else f"it has no {MANIFEST_NAME}"
        return f"{path}: the GPU that it was built for is not recorded: {why}"
    return gpu_problem(str(path), engine.sm, engine.world_size, 1, here)
