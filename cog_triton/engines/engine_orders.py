"""Messages between an engine process and the parent that has started it."""

from __future__ import annotations

from cog_triton.errors import CogTritonError
from cog_triton.ipc.messages import Message


class Opened(Message, frozen=True):
    """From an engine's process that has loaded its engine."""


class NotOpened(Message, frozen=True):
    """From a process whose engine does not load."""

    error: CogTritonError


class Serve(Message, frozen=True):
    """To an engine: listen at `address`, as the one of this `generation` to do so, from 1."""

    address: str
    generation: int


class FallAsleep(Message, frozen=True):
    """To an engine that nobody uses: move the weights to host memory, drop the KV cache."""


class WakeUp(Message, frozen=True):
    """To an engine that sleeps: move the weights back, and make a new KV cache."""


class SleepChanged(Message, frozen=True):
    """From the engine: it has done so; or `error`, then it is as before."""

    error: CogTritonError | None = None


class Stop(Message, frozen=True):
    """To an engine: end now."""
