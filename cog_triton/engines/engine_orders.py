"""Messages between an engine process and the server that has started it."""

from __future__ import annotations

from dataclasses import dataclass

from cog_triton.errors import CogTritonError
from cog_triton.ipc.messages import message


@message
@dataclass(frozen=True, slots=True)
class Opened:
    """From the engine's process `pid`, which has loaded its engine."""

    pid: int


@message
@dataclass(frozen=True, slots=True)
class NotOpened:
    """From a process whose engine does not load."""

    error: CogTritonError


@message
@dataclass(frozen=True, slots=True)
class Serve:
    """To an engine: listen at `address`, as the one of this `generation` to do so, from 1."""

    address: str
    generation: int


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
