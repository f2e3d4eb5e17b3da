"""An engine keeper that a test starts."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

from cog_triton.keeper.engine_replicas import ONE, EngineReplicas
from cog_triton.keeper.keeper_client import KeeperClient
from cog_triton.system import reaper

PATIENCE_S = 60


class Keeper:
    """A keeper process, whose deaths of engines are read on a loop of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        spare: bool = False,
        replicas: EngineReplicas = ONE,
    ) -> None:
        self.client = KeeperClient(directory, spare=spare, replicas=replicas)
        self.directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self) -> None:
        here = str(Path(__file__).parent)
        path = here + os.pathsep + os.environ.get("PYTHONPATH", "")
        self.run(self.client.start({**os.environ, "PYTHONPATH": path}))

    def run(self, work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)  # type: ignore[arg-type]

    def death(self) -> str:
        return self.run(self.client.wait_for_death()).reason

    def kill_engine(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self.client.kill_engine, reason)

    @property
    def pids(self) -> set[int]:
        """Processes below the keeper's reaper, which is not among them."""
        assert self.client._process is not None
        return reaper.descendants(self.client._process.process.pid)

    def close(self) -> None:
        self.run(self.client.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
