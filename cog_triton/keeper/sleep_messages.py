"""Messages by which an engine gives up its GPU memory, and takes it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cog_triton.errors import CogTritonError
from cog_triton.keeper.keeper_messages import EngineSpec

CHECKPOINT_VARIABLE = "PARK_CHECKPOINT"
"""The keeper's variable: with 0 it leaves the driver's checkpoint calls out."""
PARKABLE = "parkable"
"""Parameter of an engine: "true" where it is to be able to sleep."""
SPARE_LOADS = "spare_loads"
"""Parameter of an engine that can be parked: whether a spare loads "beside" one that serves, or
"first", since the GPU has no room for both."""


def parkable(spec: EngineSpec) -> EngineSpec:
    """The specification of an engine that can be parked, where its family can be; else `spec`."""
    if SPARE_LOADS not in dict(spec.parameters):
        return spec
    return replace(spec, parameters=tuple(sorted({*spec.parameters, (PARKABLE, "true")})))


def is_parkable(spec: EngineSpec) -> bool:
    """Whether engines of this specification can be parked."""
    return dict(spec.parameters).get(PARKABLE) == "true"


def is_spare_first(spec: EngineSpec) -> bool:
    """Whether the spare must be loaded and parked before the engine that serves is."""
    return is_parkable(spec) and dict(spec.parameters).get(SPARE_LOADS) == "first"


@dataclass(frozen=True, slots=True)
class FallAsleep:
    """To an engine that nobody uses: move the weights to host memory, drop the KV cache."""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """To an engine that sleeps: move the weights back, and make a new KV cache."""


@dataclass(frozen=True, slots=True)
class SleepChanged:
    """From the engine: it has done so; or `error`, then it is as before.

    `shares` says why what is left on its GPUs cannot be checkpointed, where that is known.
    """

    error: CogTritonError | None = None
    shares: str | None = None
