"""Sleep mode of vLLM: an idle engine without its weights and KV cache on the GPU.

Weights wait in host memory, whose size is checked beforehand: else the kernel kills the engine
while it falls asleep. The KV cache is dropped, and with it the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from cog_triton.engines.engine_orders import FallAsleep, SleepChanged, WakeUp
from cog_triton.engines.vllm.model_directory import weight_bytes
from cog_triton.errors import CogTritonError, EngineNotParked
from cog_triton.system.host_memory import host_memory

_OF_A_PROCESS = 4 << 30
"""Bytes of a rank beside its weights: an engine of 8B took 20 GB of host memory."""


def parkable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that can sleep: its memory comes from a pool that can be emptied."""
    return {**arguments, "enable_sleep_mode": True}


class EngineSleep:
    """Falling asleep and waking up of one AsyncLLM, which has not served before it sleeps."""

    def __init__(self, engine: Any, arguments: Mapping[str, Any]) -> None:
        self._engine = engine
        self._arguments = arguments

    async def obey(self, order: FallAsleep | WakeUp) -> SleepChanged:
        """Do what is ordered; what goes wrong is in the answer."""
        try:
            if isinstance(order, FallAsleep):
                self._check()
                await self._engine.sleep(level=1)
            else:
                await self._engine.wake_up()
        except CogTritonError as error:
            return SleepChanged(error)
        except Exception as error:  # noqa: BLE001 - the server must get whatever it is
            return SleepChanged(EngineNotParked(f"vLLM: {type(error).__name__}: {error}"))
        return SleepChanged()

    def _check(self) -> None:
        if not self._arguments.get("enable_sleep_mode"):
            raise EngineNotParked("the engine was started without vLLM's enable_sleep_mode")
        needed = weight_bytes(Path(self._arguments["model"]))
        needed += ranks(self._arguments) * _OF_A_PROCESS
        memory = host_memory()
        if memory.free < needed:
            raise EngineNotParked(
                f"it needs {needed / 1e9:.1f} GB of host memory, and {memory.free / 1e9:.1f} GB are"
                f" left ({memory.limits})"
            )


def ranks(arguments: Mapping[str, Any]) -> int:
    """Ranks of one engine, each with a GPU."""
    sizes = (arguments.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline"))
    return prod(int(size or 1) for size in sizes)
