"""Parking of a spare engine: loaded and warm, with its memory moved from the GPU to the host.

vLLM's sleep moves the weights and drops the KV cache, in which the most memory is; the driver's
checkpoint moves what is left and keeps contexts and CUDA graphs. An engine of 8B then has 4 MiB on
the GPU, and is back in 2 s, where a start takes more than a minute.
"""

from __future__ import annotations

import asyncio
import os
import time

from cog_triton.errors import EngineNotParked
from cog_triton.keeper.checkpoint_process import CheckpointProcess
from cog_triton.keeper.keeper_messages import CHECKPOINT_VARIABLE, FallAsleep, WakeUp
from cog_triton.keeper.kept_engine import KeptEngine, ParkedEngine
from cog_triton.system import reaper
from cog_triton.system.host_memory import resident_bytes

_SLEEP_S = 120.0  # the first time host memory is pinned: 9 s for 16 GB
_WAKE_S = 60.0


class EngineParking:
    """Parks engines that nobody uses, and takes them back; one at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._checkpoints: CheckpointProcess | None = None
        self._unavailable = ""

    async def park(self, engine: KeptEngine) -> ParkedEngine:
        """Park an engine that is ready: where the driver cannot checkpoint it, it only sleeps.

        Raises E2110 for one that stays as it was, and E2111 for one that must be ended.
        """
        async with self._lock:
            began = time.monotonic()
            answer = await engine.ask(FallAsleep(), _SLEEP_S)
            pids: tuple[int, ...] = ()
            reason = answer.shares or ""
            if not reason:
                try:
                    pids = await asyncio.to_thread(self._checkpoint, engine.root_pid)
                except EngineNotParked as error:
                    reason = error.detail
            held = resident_bytes(engine.root_pid)
            engine.parked = ParkedEngine(held, time.monotonic() - began, pids, reason)
            return engine.parked

    async def unpark(self, engine: KeptEngine) -> float:
        """Take a parked engine back to the GPU; returns the seconds that it took.

        Raises E2110 or E2111; it must be ended then.
        """
        async with self._lock:
            began = time.monotonic()
            if engine.parked is None:  # somebody was before us
                return 0.0
            if engine.parked.pids and self._checkpoints is not None:
                await asyncio.to_thread(self._checkpoints.restore, engine.parked.pids)
            await engine.ask(WakeUp(), _WAKE_S)
            engine.parked = None
            return time.monotonic() - began

    async def settled(self) -> None:
        """Wait until no engine is on its way."""
        async with self._lock:
            pass

    def close(self) -> None:
        """End the process that calls the driver."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _checkpoint(self, root: int) -> tuple[int, ...]:
        """Checkpoint those processes below `root` that have CUDA."""
        if os.environ.get(CHECKPOINT_VARIABLE) == "0":
            raise EngineNotParked(f"{CHECKPOINT_VARIABLE}=0")
        if self._unavailable:
            raise EngineNotParked(self._unavailable)
        if self._checkpoints is None:
            try:
                self._checkpoints = CheckpointProcess()
            except EngineNotParked as error:
                self._unavailable = error.detail
                raise
        states = self._checkpoints.states(sorted(reaper.descendants(root)))
        if not states:
            raise EngineNotParked("none of its processes has CUDA")
        self._checkpoints.checkpoint(list(states))
        return tuple(states)
