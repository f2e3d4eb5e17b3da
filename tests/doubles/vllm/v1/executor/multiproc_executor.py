"""Double of vllm/v1/executor/multiproc_executor.py: a node's workers, and the leader's way to them.

Each step of the leader waits for all nodes, as a collective does. As in vLLM, no side notices the
other's death: a step then never ends, nor does a node without a leader.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from typing import Any

_STEP = b"."
_CONNECT_S = 60


class MultiprocExecutor:
    def __init__(self, vllm_config: Any, monitor_workers: bool = True) -> None:
        config = vllm_config.parallel_config
        assert 0 < config.node_rank < config.nnodes
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                self._leader = socket.create_connection((config.master_addr, config.master_port))
                return
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def start_worker_monitor(self, inline: bool = False) -> None:
        assert inline
        while self._leader.recv(1):
            self._leader.sendall(_STEP)
        while True:
            signal.pause()


class RemoteWorkers:
    """The other nodes' workers, once all of them are there; vLLM has no such class."""

    def __init__(self, config: Any) -> None:
        self._nodes: list[socket.socket] = []
        if config.nnodes == 1:
            return
        with socket.create_server((config.master_addr, config.master_port)) as listener:
            for _ in range(1, config.nnodes):
                node, _ = listener.accept()
                node.setblocking(False)
                self._nodes.append(node)

    async def step(self) -> None:
        loop = asyncio.get_running_loop()
        for node in self._nodes:
            try:
                await loop.sock_sendall(node, _STEP)
                if await loop.sock_recv(node, 1):
                    continue
            except ConnectionError:
                pass
            await asyncio.Event().wait()
