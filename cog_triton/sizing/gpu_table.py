"""Table of GPUs by name: compute capability and memory as NVIDIA's driver reports it, and ours."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from cog_triton.errors import EngineIncompatible, InvalidArgument, nearest
from cog_triton.system import gpus

MIB = 1 << 20
COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs of one machine that are tried where none is given."""
_FP8_SM = 89
_LEAST_SM = 80


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU: `sm` as 90 for compute capability 9.0, `memory` in bytes.

    `free` is what others leave of it now; None for a kind, and where it is not known.
    """

    name: str
    sm: int
    memory: int
    free: int | None = None

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply FP8 (Ada, Hopper and later)."""
        return self.sm >= _FP8_SM


# MiB by nvidia-smi, with ECC as the card has it by default.
_TABLE = {
    "a10": Gpu("A10", 86, 23028 * MIB),
    "a10g": Gpu("A10G", 86, 23028 * MIB),
    "a30": Gpu("A30", 80, 24576 * MIB),
    "a40": Gpu("A40", 86, 46068 * MIB),
    "a100": Gpu("A100 80GB", 80, 81920 * MIB),
    "a100-40gb": Gpu("A100 40GB", 80, 40960 * MIB),
    "a6000": Gpu("RTX A6000", 86, 49140 * MIB),
    "l4": Gpu("L4", 89, 23034 * MIB),
    "l40": Gpu("L40", 89, 46068 * MIB),
    "l40s": Gpu("L40S", 89, 46068 * MIB),
    "rtx-6000-ada": Gpu("RTX 6000 Ada", 89, 49140 * MIB),
    "rtx-3090": Gpu("RTX 3090", 86, 24576 * MIB),
    "rtx-4090": Gpu("RTX 4090", 89, 24564 * MIB),
    "rtx-5090": Gpu("RTX 5090", 120, 32607 * MIB),
    "rtx-pro-6000": Gpu("RTX PRO 6000", 120, 97887 * MIB),
    "h100": Gpu("H100 80GB", 90, 81559 * MIB),
    "h100-nvl": Gpu("H100 NVL", 90, 95830 * MIB),
    "h200": Gpu("H200", 90, 143771 * MIB),
    "gh200": Gpu("GH200", 90, 97871 * MIB),
    "b200": Gpu("B200", 100, 183359 * MIB),
    "b300": Gpu("B300", 103, 275040 * MIB),
}
_ALIASES = {
    "a100-80gb": "a100",
    "h100-80gb": "h100",
    "rtx-a6000": "a6000",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}
_WANTED = re.compile(r"(?:(\d{1,4}) ?x ?)?([a-z][a-z0-9 _-]*|\d{4})")


def known() -> list[Gpu]:
    """All GPUs of the table, the smallest first."""
    return sorted(_TABLE.values(), key=lambda gpu: (gpu.memory, gpu.sm))


def find(wanted: str) -> tuple[Gpu, int | None]:
    """GPU and number of ``l40s``, ``H100`` or ``8xh100``; None if no number is given.

    Raises:
        InvalidArgument: it is not in the table.
    """
    match = _WANTED.fullmatch(wanted.strip().lower())
    if match is not None:
        key = re.sub(r"[ _]", "-", match[2])
        key = _ALIASES.get(key, key)
        count = int(match[1]) if match[1] else None
        if key in _TABLE and count != 0:
            return _TABLE[key], count
    raise InvalidArgument(
        f"--gpu {wanted!r}: must be one of {', '.join(_TABLE)}, several as 4xh100"
        f"{nearest(wanted.lower(), [*_TABLE, *_ALIASES])}"
    )


def require_supported(gpu: Gpu) -> None:
    """Refuse a GPU that no runner image is for.

    Raises:
        EngineIncompatible: its compute capability is below 8.0.
    """
    if gpu.sm < _LEAST_SM:
        raise EngineIncompatible(
            f"{gpu.name} is sm_{gpu.sm}: must be sm_{_LEAST_SM} (A100) or later; for the CPU,"
            " leave --gpu out and use cog-triton serve"
        )


def gpus_here() -> list[Gpu]:
    """GPUs of this machine in CUDA's order, and what is free of each.

    Raises:
        EngineIncompatible: the driver fails.
    """
    read = (gpus.gpu_names, gpus.visible_gpus, gpus.gpu_memory, gpus.free_memory)
    return [Gpu(*facts) for facts in zip(*(facts() for facts in read), strict=True)]


def gpu_here() -> tuple[Gpu, int] | None:
    """The GPU of this machine with the least free memory, and how many there are; None without one.

    Raises:
        EngineIncompatible: the driver fails, or the GPUs are of several compute capabilities.
    """
    found = gpus_here()
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
    here = gpu_here()
    if here is None:
        raise InvalidArgument("this machine has no GPU: name one, as --gpu l40s or --gpu 4xh100")
    return dataclasses.replace(here[0], free=None), [count for count in COUNTS if count <= here[1]]
