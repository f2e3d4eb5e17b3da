"""An engine keeper that a test starts."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cog_triton.keeper.keeper_client import ONE, EngineReplicas, KeeperClient
from cog_triton.keeper.keeper_messages import EngineSpec
from cog_triton.system import reaper

PATIENCE_S = 60


def until(holds: Callable[[], Any]) -> Any:
    """Wait until something holds; returns what it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@contextmanager
def keeping(directory: Path, ahead: EngineSpec | None = None, **options: Any) -> Iterator[Keeper]:
    """A keeper that has started; none of its processes is left afterwards."""
    keeper = Keeper(directory, **options)
    keeper.start(ahead)
    yield keeper
    pids = keeper.pids
    keeper.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


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

    def start(self, ahead: EngineSpec | None = None) -> None:
        here = str(Path(__file__).parent)
        path = here + os.pathsep + os.environ.get("PYTHONPATH", "")
        self.run(self.client.start({**os.environ, "PYTHONPATH": path}, ahead))

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

    @property
    def program(self) -> int:
        """Process id of the keeper itself."""
        lines = {Path(f"/proc/{pid}/cmdline").read_bytes(): pid for pid in self.pids}
        of_keeper = [line for line in lines if b"keeper_process" in line]
        (own,) = [line for line in of_keeper if b"reaper.py" not in line]
        return lines[own]

    def close(self) -> None:
        self.run(self.client.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
