"""Sleep mode of vLLM: an idle engine without its weights and KV cache on the GPU.

Weights wait in host memory, whose size is checked beforehand: else the kernel kills the engine
while it falls asleep. The KV cache is dropped, and with it the prefix cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from cog_triton.engines.vllm.model_directory import weight_bytes
from cog_triton.errors import CogTritonError, EngineNotParked
from cog_triton.keeper.keeper_messages import FallAsleep, SleepChanged, WakeUp
from cog_triton.system.host_memory import host_memory

_OF_A_PROCESS = 4 << 30
"""Bytes of a rank beside its weights: an engine of 8B took 20 GB of host memory."""


def parkable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that can sleep: its memory comes from a pool that can be emptied."""
    return {**arguments, "enable_sleep_mode": True}


class EngineSleep:
    """Falling asleep and waking up of one AsyncLLM, which must be idle meanwhile."""

    def __init__(self, engine: Any, arguments: Mapping[str, Any]) -> None:
        self._engine = engine
        self._arguments = arguments

    async def obey(self, order: FallAsleep | WakeUp, *, running: int = 0) -> SleepChanged:
        """Do what is ordered; what goes wrong is in the answer, as with requests `running`."""
        try:
            if isinstance(order, FallAsleep):
                if running:
                    raise EngineNotParked(f"{running} requests run in it")
                self._check()
                await self._engine.sleep(level=1)
                return SleepChanged(shares=shared_memory(self._arguments, os.environ))
            await self._engine.wake_up()
        except CogTritonError as error:
            return SleepChanged(error)
        except Exception as error:  # noqa: BLE001 - the keeper must get whatever it is
            return SleepChanged(EngineNotParked(f"vLLM: {type(error).__name__}: {error}"))
        return SleepChanged()

    def _check(self) -> None:
        """Raise E2110 for an engine that cannot sleep, or has no room in host memory."""
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


def shared_memory(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Why the driver cannot checkpoint this engine, None where nothing is known to be in the way.

    Ranks share GPU memory in vLLM's own all-reduce and in NCCL: by peer-to-peer and shared-memory
    transports, unless NCCL gives it up in its sleep, and by NVLink multicast.
    """
    if ranks(arguments) == 1:
        return None
    off = {name for name, value in environment.items() if name.startswith("NCCL_") and value == "1"}
    multicast = environment.get("NCCL_NVLS_ENABLE") != "0"
    if not arguments.get("disable_custom_all_reduce"):
        return 'ranks share GPU memory: model.json needs "disable_custom_all_reduce": true'
    apart = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"} <= off
    if multicast or not (apart or arguments.get("enable_nccl_comm_suspend")):
        return (
            "ranks share GPU memory: it takes NCCL_NVLS_ENABLE=0 in the environment, and either"
            ' "enable_nccl_comm_suspend": true in model.json, which vLLM 0.33 has, or'
            " NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1"
        )
    return None


def ranks(arguments: Mapping[str, Any]) -> int:
    """Ranks of one engine, each with a GPU."""
    sizes = (arguments.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline"))
    return prod(int(size or 1) for size in sizes)
