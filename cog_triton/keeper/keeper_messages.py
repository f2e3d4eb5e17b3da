"""Messages of the engine keeper: with stubs, engine processes and the supervisor.

The first message of a connection says who connects: an `Attach`, a `LeaseRequest`, a `Locate` or a
`Watch`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import Self

from cog_triton.errors import CogTritonError

KEEPER_VARIABLE = "COG_TRITON_ENGINE_KEEPER"
"""Environment variable of tritonserver with the name of the keeper's socket."""
REPLICAS_VARIABLE = "COG_TRITON_ENGINE_REPLICAS"
"""Environment variable of tritonserver with the number of engines that its stubs lease."""

HEARTBEAT_S = 0.25
"""Longest silence of a keeper that is well."""
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

    @classmethod
    def of(cls, engine: str, parameters: Mapping[str, str]) -> Self:
        """For the Python that `parameters` name as ``engine_python``, by default our own."""
        other = parameters.get("engine_python")
        return cls(
            engine=engine,
            parameters=tuple(sorted(parameters.items())),
            python=other or sys.executable,
            isolated=bool(other),
        )


@dataclass(frozen=True, slots=True)
class Attach:
    """From an engine process that has started: its number, and its process id."""

    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class Opened:
    """From an engine process that has loaded its engine, and listens.

    `progress` is the descriptor of the `SharedTime` when its next step is due, if it keeps one.
    """

    progress: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """From a stub: lease an engine for the tritonserver `owner`, 0 for none.

    The connection is the lease; a second request on it says that the leased engine was lost.
    `replica` tells the leases of one owner apart, from 0.
    """

    spec: EngineSpec
    owner: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """From a stub: the lease ends as intended."""


@dataclass(frozen=True, slots=True)
class Locate:
    """From another stub of tritonserver `owner`: where is the engine leased as `replica`?"""

    owner: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Leased:
    """To stubs: the engine listens on the socket `address`; None where it is not known yet."""

    address: str | None


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """To a stub: the engine does not load; `error` is its coded error, or what is known."""

    error: CogTritonError | str


@dataclass(frozen=True, slots=True)
class Watch:
    """From the supervisor: tell what happens to engines."""


@dataclass(frozen=True, slots=True)
class KillLeased:
    """From the supervisor: kill the engine leased as `replica`, or all, as they are at fault."""

    reason: str
    replica: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """To the supervisor: an engine process runs, and loads its engine."""


@dataclass(frozen=True, slots=True)
class Rest:
    """From a front door that swaps models: park the leased engines, which have no requests."""


@dataclass(frozen=True, slots=True)
class Rouse:
    """From a front door that swaps models: take the leased engines back."""


@dataclass(frozen=True, slots=True)
class RestChanged:
    """To the front door: it is done, or `error` says why the engine stays on the GPU."""

    error: CogTritonError | None = None


@dataclass(frozen=True, slots=True)
class EngineDied:
    """To the supervisor: an engine process died; `leased` unless it was a spare.

    `replica` is what it was leased as, `serving` the number of engines that are leased still.
    """

    reason: str
    leased: bool = True
    replica: int = 0
    serving: int = 0


@dataclass(frozen=True, slots=True)
class EnginesKept:
    """To the supervisor: process ids of the engines' reapers, of those at work and of spares.

    It comes at least every `HEARTBEAT_S`.
    """

    leased: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLeased:
    """To the supervisor: a stub has got the lease of an engine."""


EngineEvent = EngineStarted | EngineDied | EngineLeased
"""What happens to an engine, as the supervisor is told."""
