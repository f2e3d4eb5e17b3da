"""An engine fleet that a test starts."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_hosts import ask, token_ids, tokens

from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_spec import EngineSpec, own_addresses
from cog_triton.errors import TritonUnavailable
from cog_triton.processes.engine_child import EngineChild
from cog_triton.processes.engine_fleet import EngineDeath, EngineFleet
from cog_triton.system import reaper

PATIENCE_S = 60


def until(holds: Callable[[], Any]) -> Any:
    """Wait until something holds; returns what it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def says(engine: EngineClient, prompt: list[int], count: int = 4) -> list[int]:
    """Tokens of a request, sent until one is not lost with an engine that has died."""

    def answered() -> list[int] | None:
        events = ask(engine, tokens(prompt, count)) if engine.loads() else []
        lost = not events or isinstance(events[-1].error, TritonUnavailable)
        return None if lost else token_ids(events)

    found: list[int] = until(answered)
    return found


class StartedFleet:
    """A fleet on a loop of its own thread, and a client; none of its processes is left after."""

    def __init__(self, directory: Path, spec: EngineSpec, *args: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._mark = f"FLEET_{secrets.token_hex(8)}"
        self.directory = directory
        self.fleet = EngineFleet(directory, spec, *args, **options)
        self.connect()

    def connect(self) -> None:
        """Have a client at the addresses of now."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.fleet.variables.items():
                patch.setenv(name, value)
            self.addresses = own_addresses()
        self.client = EngineClient(self.addresses, "owner")
        self.client.start()

    def start(self) -> None:
        path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.call(self.fleet.start, {**os.environ, "PYTHONPATH": path, self._mark: "1"})

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        return self.run(call())

    def serving(self, replica: int = 0) -> EngineChild:
        """The engine that serves as `replica`; waits for one."""
        engine: EngineChild = until(lambda: self.fleet._serving.get(replica))
        return engine

    def pid(self, replica: int = 0) -> int:
        """Its process."""
        pid = self.serving(replica)._pid
        assert pid is not None
        return pid

    def death(self) -> EngineDeath:
        death: EngineDeath = self.run(self.fleet.wait_for_death())
        return death

    @property
    def pids(self) -> set[int]:
        """All processes of its engines and their reapers."""
        return reaper._marked(self._mark)

    def close(self) -> None:
        self.client.close()
        self.run(self.fleet.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert not self.pids


@contextmanager
def started(*args: Any, **options: Any) -> Iterator[StartedFleet]:
    """See `StartedFleet`."""
    fleet = StartedFleet(*args, **options)
    fleet.start()
    try:
        yield fleet
    finally:
        fleet.close()
