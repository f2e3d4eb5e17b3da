"""Messages between an engine process and the parent that has started it."""

from __future__ import annotations

from cog_triton.errors import CogTritonError
from cog_triton.ipc.messages import message


@message
class Opened:
    """From an engine's process that has loaded its engine."""


@message
class NotOpened:
    """From a process whose engine does not load."""

    error: CogTritonError


@message
class Serve:
    """To an engine: listen at `address`, as the one of this `generation` to do so, from 1."""

    address: str
    generation: int


@message
class FallAsleep:
    """To an engine that nobody uses: move the weights to host memory, drop the KV cache."""


@message
class WakeUp:
    """To an engine that sleeps: move the weights back, and make a new KV cache."""


@message
class SleepChanged:
    """From the engine: it has done so; or `error`, then it is as before."""

    error: CogTritonError | None = None


@message
class Stop:
    """To an engine: end now."""
