"""The server's link with its parent, which runs engines, Triton and Cog for it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from cog_triton.engines import engine_spec
from cog_triton.ipc.messages import Stream
from cog_triton.processes.orders import (
    EndEngine,
    EngineDeath,
    EnginesChanged,
    Running,
    StartEngines,
    StartTriton,
    StopCog,
    StopEngines,
    StopTriton,
    TritonChanged,
)
from cog_triton.system.host_memory import resident_bytes

_STARTING = -1


class ParentLink:
    """Orders to the parent, and its reports; in one event loop. The server ends with the parent."""

    def __init__(self, stream: Stream, running: Running) -> None:
        self.run_dir = Path(running.run_dir)
        self.engines = Engines(self, running.engines)
        self.triton = TritonProcesses(self, running)
        self.send = stream.send
        """Send an order."""
        self._cog_ended = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read(stream))

    @classmethod
    async def of(cls, own: socket.socket) -> Self:
        """For the socket of a server that begins."""
        stream = await Stream.of(own)
        return cls(stream, await stream.receive())

    @property
    def has_loaded(self) -> bool:
        """Whether an earlier server has loaded an engine."""
        return self.engines.stands or self.triton.standing is not None

    async def stop_cog(self) -> None:
        """Have Cog stopped for good."""
        self.send(StopCog())
        await self._cog_ended.wait()

    async def _read(self, stream: Stream) -> None:
        try:
            while True:
                self._take(await stream.receive())
        except (EOFError, OSError):
            os._exit(1)  # the parent has died

    def _take(self, message: Any) -> None:
        if isinstance(message, TritonChanged):
            self.triton.take(message)
        elif isinstance(message, StopCog):
            self._cog_ended.set()
        else:
            self.engines.take(message)


class TritonProcesses:
    """Processes of one Triton after the other."""

    def __init__(self, parent: ParentLink, running: Running) -> None:
        self._parent = parent
        self._changed = asyncio.Event()
        self.standing = running.triton
        """The order of a Triton that an earlier server has started, and that runs."""
        self._state = TritonChanged(running.triton_pid)

    @property
    def root_pid(self) -> int:
        """Process id of the ancestor of them all; 0 if there are none."""
        return self._state.pid

    async def start(self, order: StartTriton) -> None:
        """Start them; there are none. They may have ended already when this returns."""
        self._state = TritonChanged(_STARTING)
        self._parent.send(order)
        await self._until(lambda: self._state.pid != _STARTING)

    async def wait(self) -> TritonChanged:
        """Wait until they have ended, or are ended for a fault."""
        await self._until(lambda: not self._state.pid or self._state.reason)
        return self._state

    async def stop(self, *, kills: bool = False) -> None:
        """Let what runs end for a few seconds, or kill all; none is left when this returns."""
        if self._state.pid:
            self._parent.send(StopTriton(kills))
        await self._until(lambda: not self._state.pid)

    async def _until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def take(self, message: TritonChanged) -> None:
        """Take a report of the parent."""
        self.standing, self._state = None, message
        self._changed.set()


class Engines:
    """Engine processes, each at a fixed address; others take the place of those that die."""

    def __init__(self, parent: ParentLink, standing: StartEngines | None) -> None:
        self._parent = parent
        self._address = standing.address if standing else engine_spec.new_address()
        self._order: StartEngines | None = None
        self.stands = standing is not None
        """Whether an earlier server has had them started."""
        self._state = EnginesChanged({}, [], [])
        self._serves, self._stopped = asyncio.Event(), asyncio.Event()
        self._deaths: asyncio.Queue[EngineDeath] = asyncio.Queue()
        self._failure: asyncio.Queue[str] = asyncio.Queue()

    def choose(self, order: StartEngines) -> None:
        """Have engines of this order from now on; `start` starts them."""
        self._order = replace(order, address=self._address)

    @property
    def chosen(self) -> bool:
        """Whether there are to be engine processes; else engines compute inside tritonserver."""
        return self._order is not None

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables that tritonserver's environment needs."""
        return engine_spec.variables(self._address, self._order.count) if self._order else {}

    @property
    def serving(self) -> int:
        """Number of engines that serve."""
        return len(self._state.serving)

    def memory(self) -> Mapping[str, int]:
        """Resident memory in bytes of engine processes, those that serve and others."""
        state = self._state
        return {
            "leased": sum(map(resident_bytes, state.pids)),
            "spare": sum(map(resident_bytes, state.others)),
        }

    def start(self, environment: Mapping[str, str]) -> None:
        """Start to load them, unless they were started; after one did not load, all begin again."""
        if self._order is not None:
            self._failure = asyncio.Queue()
            self._parent.send(replace(self._order, environment=environment))

    async def wait_until_serving(self) -> Mapping[int, int]:
        """Wait until an engine serves; returns the generations of those that do, by replica.

        Forgets the deaths until then.
        """
        await self._serves.wait()
        while not self._deaths.empty():
            self._deaths.get_nowait()
        return self._state.serving

    async def wait_until_failed(self) -> str:
        """Wait until an engine does not load while no other serves, or at the start."""
        return await self._failure.get()

    @property
    def has_died(self) -> bool:
        """Whether `wait_for_death` would return at once."""
        return not self._deaths.empty()

    async def wait_for_death(self) -> EngineDeath:
        """Wait until an engine that served has died, or `wait_until_failed`; one at a time."""
        return await self._deaths.get()

    def end(self, reason: str, replica: int | None = None) -> None:
        """End an engine that serves, or all, for a fault; `wait_for_death` reports it."""
        self._parent.send(EndEngine(reason, replica))

    async def kill(self) -> None:
        """Kill all engines; none is left when this returns, and `start` starts others.

        Another user can see an address, and take it while no engine listens there.
        """
        if self._order is None:
            return
        self._stopped.clear()
        self._parent.send(StopEngines())
        await self._stopped.wait()
        self._address = engine_spec.new_address()
        self.choose(self._order)

    def take(self, message: EnginesChanged | EngineDeath | StopEngines) -> None:
        """Take a report of the parent."""
        if isinstance(message, EnginesChanged):
            self._state = message
            (self._serves.set if message.serving else self._serves.clear)()
        elif isinstance(message, EngineDeath):
            self._deaths.put_nowait(message)
            if message.lasted is None:
                self._failure.put_nowait(message.reason)
        else:
            self._state = EnginesChanged({}, [], [])
            self._serves.clear()
            self._deaths, self._failure = asyncio.Queue(), asyncio.Queue()
            self._stopped.set()
