"""Double of vllm/v1/engine/utils.py: EngineCore's processes, until they are ready."""

from __future__ import annotations

import secrets
import socket
import weakref
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.utils.system_utils import get_mp_context


class CoreEngineProcManager:
    def __init__(self, local_engine_count: int, vllm_config: Any, handshake_address: str) -> None:
        context = get_mp_context()
        from vllm.v1.engine.core import EngineCoreProc

        self.processes: list[BaseProcess] = []
        for index in range(local_engine_count):
            kwargs = {"vllm_config": vllm_config, "handshake_address": handshake_address}
            self.processes.append(
                context.Process(
                    target=EngineCoreProc.run_engine_core,
                    name=f"EngineCore_DP{index}" if local_engine_count > 1 else "EngineCore",
                    kwargs=kwargs | {"dp_rank": index, "local_dp_rank": index},
                )
            )
        self._finalizer = weakref.finalize(self, shutdown, self.processes)
        for process in self.processes:
            process.start()

    def shutdown(self, timeout: float | None = None) -> None:
        if self._finalizer.detach() is not None:
            shutdown(self.processes, timeout)


def shutdown(processes: list[BaseProcess], timeout: float | None = None) -> None:
    """In vLLM of v1/utils.py."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(timeout or 5)
        if process.is_alive():
            process.kill()


def launch_core_engines(vllm_config: Any, count: int) -> CoreEngineProcManager:
    """In vLLM also the coordinator of data parallelism, and a message with addresses."""
    address = f"\0vllm-double-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(count)
        manager = CoreEngineProcManager(count, vllm_config, address)
        sentinels = [process.sentinel for process in manager.processes]
        for _ in range(count):
            if listener not in wait([listener, *sentinels]):
                raise RuntimeError("Engine core initialization failed. See root cause above.")
            core, _ = listener.accept()
            with core:
                if core.recv(5) != b"READY":
                    raise RuntimeError("Engine core initialization failed. See root cause above.")
    return manager
