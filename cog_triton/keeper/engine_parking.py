"""Parking of a spare engine: loaded and warm, asleep by vLLM's sleep mode.

Sleep moves the weights to host memory and drops the KV cache, in which the most memory is. An
engine of 8B then has 1.4 to 1.7 GB on the GPU, and is back in 1.5 s, where a start takes more than
a minute.
"""

from __future__ import annotations

import asyncio
import time

from cog_triton.keeper.keeper_messages import FallAsleep, WakeUp
from cog_triton.keeper.kept_engine import KeptEngine, ParkedEngine
from cog_triton.system.host_memory import resident_bytes

_SLEEP_S = 120.0  # the first time host memory is pinned: 9 s for 16 GB
_WAKE_S = 60.0


class EngineParking:
    """Parks engines that nobody uses, and takes them back; one at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def park(self, engine: KeptEngine) -> ParkedEngine:
        """Park an engine that is ready.

        Raises E2110 for one that stays as it was, and E2111 for one that must be ended.
        """
        async with self._lock:
            began = time.monotonic()
            await engine.ask(FallAsleep(), _SLEEP_S)
            held = resident_bytes(engine.root_pid)
            engine.parked = ParkedEngine(held, time.monotonic() - began)
            return engine.parked

    async def unpark(self, engine: KeptEngine) -> float:
        """Take a parked engine back to the GPU; returns the seconds that it took.

        Raises E2110 or E2111; it must be ended then.
        """
        async with self._lock:
            began = time.monotonic()
            if engine.parked is None:  # somebody was before us
                return 0.0
            await engine.ask(WakeUp(), _WAKE_S)
            engine.parked = None
            return time.monotonic() - began

    async def settled(self) -> None:
        """Wait until no engine is on its way."""
        async with self._lock:
            pass
