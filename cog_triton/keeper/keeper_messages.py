"""Messages of the engine keeper: with stubs, engine processes and the supervisor.

The first message of a connection says who connects: an `Attach`, a `LeaseRequest`, a `Locate` or a
`Watch`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from cog_triton.errors import CogTritonError
from cog_triton.ipc.messages import message

KEEPER_VARIABLE = "COG_TRITON_ENGINE_KEEPER"
"""Environment variable of tritonserver with the name of the keeper's socket."""
REPLICAS_VARIABLE = "COG_TRITON_ENGINE_REPLICAS"
"""Environment variable of tritonserver with the number of engines that its stubs lease."""

HEARTBEAT_S = 0.25
"""Longest silence of a keeper that is well."""
PARKABLE = "parkable"
"""Parameter of an engine: "true" where it is to be able to sleep."""
SPARE_LOADS = "spare_loads"
"""Parameter of an engine that can be parked: whether a spare loads "beside" one that serves, or
"first", since the GPU has no room for both."""
GPUS = "gpus="
"""Begin of an argument of the keeper's program: the GPUs of one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Specification of an engine process: those with equal ones can stand in for each other.

    `engine` is ``module:class``, opened by ``from_parameters(parameters)`` in `python`. An
    `isolated` Python gets this package and nothing else of ours.
    """

    engine: str
    parameters: tuple[tuple[str, str], ...]
    python: str
    isolated: bool = False

    @property
    def is_parkable(self) -> bool:
        """Whether such engines can be parked."""
        return dict(self.parameters).get(PARKABLE) == "true"

    @property
    def is_spare_first(self) -> bool:
        """Whether the spare must be loaded and parked before the engine that serves is."""
        return self.is_parkable and dict(self.parameters)[SPARE_LOADS] == "first"

    def parkable(self) -> Self:
        """That of an engine which can be parked, where its family can be; else the same."""
        if SPARE_LOADS not in dict(self.parameters):
            return self
        return replace(self, parameters=tuple(sorted({*self.parameters, (PARKABLE, "true")})))

    @classmethod
    def of(cls, engine: str, parameters: Mapping[str, str], python: str = sys.executable) -> Self:
        """For the Python that `parameters` name as ``engine_python``, else `python`, ours."""
        other = parameters.get("engine_python")
        return cls(
            engine=engine,
            parameters=tuple(sorted(parameters.items())),
            python=other or python,
            isolated=bool(other),
        )


@message
@dataclass(frozen=True, slots=True)
class Attach:
    """From an engine process that has started: its number, and its process id."""

    number: int
    pid: int


@message
@dataclass(frozen=True, slots=True)
class Opened:
    """From an engine process that has loaded its engine, and listens.

    `progress` is the descriptor of the `SharedTime` when its next step is due, if it keeps one.
    """

    progress: int | None = field(default=None, compare=False)


@message
@dataclass(frozen=True, slots=True)
class NotOpened:
    """From an engine process whose engine does not load."""

    error: CogTritonError


@message
@dataclass(frozen=True, slots=True)
class FallAsleep:
    """To an engine that nobody uses: move the weights to host memory, drop the KV cache."""


@message
@dataclass(frozen=True, slots=True)
class WakeUp:
    """To an engine that sleeps: move the weights back, and make a new KV cache."""


@message
@dataclass(frozen=True, slots=True)
class SleepChanged:
    """From the engine: it has done so; or `error`, then it is as before."""

    error: CogTritonError | None = None


@message
@dataclass(frozen=True, slots=True)
class Stop:
    """To an engine: end now."""


@message
@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """From a stub: lease an engine for the tritonserver `owner`, 0 for none.

    The connection is the lease; a second request on it says that the leased engine was lost.
    `replica` tells the leases of one owner apart, from 0.
    """

    spec: EngineSpec
    owner: int
    replica: int = 0


@message
@dataclass(frozen=True, slots=True)
class Release:
    """From a stub: the lease ends as intended."""


@message
@dataclass(frozen=True, slots=True)
class Locate:
    """From another stub of tritonserver `owner`: where is the engine leased as `replica`?"""

    owner: int
    replica: int = 0


@message
@dataclass(frozen=True, slots=True)
class Leased:
    """To stubs: the engine listens on the socket `address`; None where it is not known yet."""

    address: str | None


@message
@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """To a stub: the engine does not load; `error` is its coded error, or what is known."""

    error: CogTritonError | str


@message
@dataclass(frozen=True, slots=True)
class Watch:
    """From the supervisor: tell what happens to engines.

    `ahead` is the engine that a stub will want, which may load until it asks.
    """

    ahead: EngineSpec | None = None


@message
@dataclass(frozen=True, slots=True)
class KillLeased:
    """From the supervisor: kill the engine leased as `replica`, or all, as they are at fault."""

    reason: str
    replica: int | None = None


@message
@dataclass(frozen=True, slots=True)
class EngineDied:
    """To the supervisor: an engine process died; `leased` unless it was a spare.

    `replica` is what it was leased as, `serving` the number of engines that are leased still.
    """

    reason: str
    leased: bool = True
    replica: int = 0
    serving: int = 0


@message
@dataclass(frozen=True, slots=True)
class EnginesKept:
    """To the supervisor: process ids of the engines' reapers, of those at work and of spares.

    It comes at least every `HEARTBEAT_S`.
    """

    leased: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class EngineLeased:
    """To the supervisor: a stub has got the lease of an engine."""


EngineEvent = EngineDied | EngineLeased
"""What happens to an engine, as the supervisor is told."""
