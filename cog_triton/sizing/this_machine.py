"""GPUs of this machine, as the sums of memory take them."""

from __future__ import annotations

import dataclasses

from cog_triton.errors import EngineIncompatible, InvalidArgument
from cog_triton.sizing.gpu_table import COUNTS, Gpu
from cog_triton.system import gpus


def gpu() -> tuple[Gpu, int] | None:
    """The GPU of this machine with the least free memory, and how many there are; None without one.

    Raises:
        EngineIncompatible: the driver fails, or the GPUs are of several compute capabilities.
    """
    read = (gpus.gpu_names, gpus.visible_gpus, gpus.gpu_memory, gpus.free_memory)
    found = [Gpu(*facts) for facts in zip(*(facts() for facts in read), strict=True)]
    if not found:
        return None
    if len({one.sm for one in found}) > 1:
        names = ", ".join(one.name for one in found)
        raise EngineIncompatible(
            f"the GPUs here are of several kinds ({names}): choose with CUDA_VISIBLE_DEVICES"
        )
    return min(found, key=lambda one: one.memory if one.free is None else one.free), len(found)


def require_gpu() -> tuple[Gpu, list[int]]:
    """The GPU of this machine, and the numbers of it that can be used.

    Raises:
        InvalidArgument: there is none.
    """
    here = gpu()
    if here is None:
        raise InvalidArgument("this machine has no GPU: name one, as --gpu l40s or --gpu 4xh100")
    return dataclasses.replace(here[0], free=None), [count for count in COUNTS if count <= here[1]]
