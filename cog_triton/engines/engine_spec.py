"""Specification of an engine process, and the addresses at which engines listen."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from cog_triton.errors import TritonUnavailable

ADDRESS_VARIABLE = "COG_TRITON_ENGINE_ADDRESS"
"""Environment variable of tritonserver with the address of its engines, without their numbers."""
REPLICAS_VARIABLE = "COG_TRITON_ENGINE_REPLICAS"
"""Environment variable of tritonserver with the number of its engines."""
PARKABLE = "parkable"
"""Parameter of an engine: "true" if it is to be able to sleep."""
SPARE_LOADS = "spare_loads"
"""Parameter of an engine that can be parked: whether a spare loads "beside" one that serves, or
"first", since the GPU has no room for both."""


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
        """That of an engine which can be parked, if its family can be; else the same."""
        if SPARE_LOADS not in dict(self.parameters):
            return self
        return replace(self, parameters=tuple(sorted({*self.parameters, (PARKABLE, "true")})))

    @classmethod
    def of(cls, engine: str, parameters: Mapping[str, str]) -> Self:
        """For the Python that `parameters` name as ``engine_python``, or ours.

        A blank one is that of Triton's models.
        """
        other = parameters.get("engine_python")
        return cls(
            engine=engine,
            parameters=tuple(sorted(parameters.items())),
            python=sys.executable if other is None else other or "python3",  # the first in PATH
            isolated=bool(other),
        )


def new_address() -> str:
    """The address of engines of one start, without their numbers; nobody can guess it."""
    return f"cog-triton-{secrets.token_hex(16)}"


def variables(address: str, count: int) -> Mapping[str, str]:
    """Variables by which the stubs of a tritonserver know `count` engines."""
    return {ADDRESS_VARIABLE: address, REPLICAS_VARIABLE: str(count)}


def own_addresses() -> Sequence[str]:
    """Addresses of the engines of this stub's server; raises E2105 if it has none."""
    prefix = os.environ.get(ADDRESS_VARIABLE)
    if not prefix:
        raise TritonUnavailable(
            f"{ADDRESS_VARIABLE} is not set: `cog-triton serve` starts the process of this engine"
            " beside tritonserver, on the same machine"
        )
    return numbered(prefix, int(os.environ.get(REPLICAS_VARIABLE) or 1))


def numbered(prefix: str, count: int) -> Sequence[str]:
    """Addresses of `count` engines."""
    return [f"{prefix}-{number}" for number in range(count)]
