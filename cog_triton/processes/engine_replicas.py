"""Engine replicas: how many engines of one model there are, and which GPUs each has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from cog_triton.errors import EngineIncompatible
from cog_triton.system.gpus import VISIBLE_GPUS, visible_gpus


@dataclass(frozen=True, slots=True)
class EngineReplicas:
    """Number of engines, and the CUDA_VISIBLE_DEVICES of each.

    Without `gpus` all see the same ones, or there are none.
    """

    count: int = 1
    gpus: Sequence[str] = ()


ONE = EngineReplicas()


def share_gpus(
    count: int,
    needed: int,
    environment: Mapping[str, str] = os.environ,
    count_gpus: Callable[[], int] = lambda: len(visible_gpus()),
) -> EngineReplicas:
    """Replicas of `needed` GPUs each, in the order of CUDA_VISIBLE_DEVICES where that is set.

    Engines that need no GPU share none; nor do any where the driver knows of no GPU, as the engine
    itself says best what it lacks. Raises E1305 where there are GPUs, and too few.
    """
    if count == 1 or not needed:
        return EngineReplicas(count)
    given = environment.get(VISIBLE_GPUS)
    if given is None:
        names = [str(number) for number in range(count_gpus())]
        if not names:
            return EngineReplicas(count)
    else:
        listed = (name.strip() for name in given.split(",") if name.strip())
        # CUDA sees none from a negative number on; of a GPU that is named twice there is but one.
        names = list(dict.fromkeys(takewhile(lambda name: not name.startswith("-"), listed)))
    if len(names) < count * needed:
        here = f"{VISIBLE_GPUS}={given}" if given is not None else "this machine"
        raise EngineIncompatible(
            f"ENGINE_REPLICAS={count}: needs {count * needed} GPUs, {needed} for each engine;"
            f" {here} has {len(names)}"
        )
    shares = (names[start : start + needed] for start in range(0, count * needed, needed))
    return EngineReplicas(count, tuple(",".join(share) for share in shares))
