"""Engines that a test has a parent's host start, over a server's link to it."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from local_parent import linked
from stack import wait_until as until
from vllm_hosts import ask, token_ids, tokens

from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_spec import EngineSpec, own_addresses
from cog_triton.errors import TritonUnavailable
from cog_triton.processes.engine_child import EngineChild
from cog_triton.processes.engine_fleet import EngineFleet
from cog_triton.processes.host import Host
from cog_triton.processes.orders import EngineDeath, StartEngines
from cog_triton.system import reaper

PATIENCE_S = 60


def says(engine: EngineClient, prompt: list[int], count: int = 4) -> list[int]:
    """Tokens of a request, sent until one is not lost with an engine that has died."""
    while True:
        events = ask(engine, tokens(prompt, count)) if engine.loads() else []
        if events and not isinstance(events[-1].error, TritonUnavailable):
            return token_ids(events)
        time.sleep(0.01)


class StartedFleet:
    """Engines on a loop of their own thread, and a client; no process is left after `close`."""

    def __init__(self, directory: Path, spec: EngineSpec, **order: Any) -> None:
        """`order` is of StartEngines."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._mark = f"FLEET_{secrets.token_hex(8)}"
        self.directory = directory
        self._link = AsyncExitStack()
        self.host = self.call(Host, directory, lambda message: None)
        link = self.run(self._link.enter_async_context(linked(directory, self.host)))
        self.engines = link.engines
        self.engines.choose(StartEngines(spec, str(directory), "", {}, **order))
        self.connect()

    def connect(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.engines.variables.items():
                patch.setenv(name, value)
            self.addresses = own_addresses()
        self.client = EngineClient(self.addresses, "owner")
        self.client.start()

    def start(self) -> None:
        self.call(self.engines.start, {**os.environ, self._mark: "1"})

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        return self.run(call())

    @property
    def fleet(self) -> EngineFleet:
        return cast(EngineFleet, until(lambda: self.host._fleet))

    def serving(self, replica: int = 0) -> EngineChild:
        return cast(EngineChild, until(lambda: self.fleet._serving.get(replica)))

    def other(self) -> EngineChild:
        """The one that does not serve."""
        (engine,) = until(lambda: self.fleet._living - {*self.fleet._serving.values()})
        return cast(EngineChild, engine)

    def pid(self, replica: int = 0) -> int:
        return self.serving(replica).process.pid

    def death(self) -> EngineDeath:
        return cast(EngineDeath, self.run(self.engines.wait_for_death()))

    @property
    def pids(self) -> set[int]:
        return reaper.marked(self._mark)

    def close(self) -> None:
        self.client.close()
        self.run(self.host.stop(kills=False))
        self.run(self._link.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert not self.pids


@contextmanager
def started(*args: Any, **options: Any) -> Iterator[StartedFleet]:
    fleet = StartedFleet(*args, **options)
    fleet.start()
    try:
        yield fleet
    finally:
        fleet.close()
