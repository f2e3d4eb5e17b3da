"""Engine loop: asyncio around any engine, in its process.

A `StepEngine` computes in the loop's thread: a step, then the messages that have come meanwhile.
The library of an `AsyncEngine` computes on its own.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import socket
import time
from abc import abstractmethod
from functools import partial
from typing import Any

from cog_triton.engines.base import ServedEngine, StepEngine
from cog_triton.engines.engine_orders import Opened, Serve, Stop
from cog_triton.engines.engine_server import EngineServer
from cog_triton.ipc.messages import Stream
from cog_triton.system.shared_time import SharedTime


class AsyncEngine(ServedEngine):
    """Engine whose library computes on its own, in the loop of `runner`; it emits to `server`."""

    server: EngineServer

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()

    @abstractmethod
    async def run(self) -> None:
        """Wait for the library's engine to die; raises what killed it, when all requests ended."""

    @abstractmethod
    async def obey(self, order: Any) -> Any:
        """Answer an order of the parent's."""

    @abstractmethod
    def close(self) -> None:
        """End the library's engine and `runner`."""


class _Steps:
    """Has a `StepEngine` compute; `progress` is when the next step is due.

    A step is a timer's callback: a task would cost another turn of the loop for each.
    """

    def __init__(self, engine: StepEngine, progress: SharedTime) -> None:
        self.server = EngineServer(engine, self._hear)
        self._engine = engine
        self._progress = progress
        self._progressed = True
        self._heard = False
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.Handle
        self._failed: asyncio.Future[None]

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._fail)
        self._failed = self._loop.create_future()
        self._timer = self._loop.call_soon(self._step)
        try:
            await self._failed
        finally:
            self._timer.cancel()

    async def obey(self, order: Any) -> Any:
        raise TypeError(f"{order!r}: this engine takes orders to stop alone")

    def _step(self) -> None:
        """Compute a step once all messages that have come are read, and plan the next one."""
        engine, server = self._engine, self.server
        if self._heard:
            self._heard = False
            self._plan(0.0)
            return
        if not (engine.waits_for_readers and server.is_behind):
            self._tell_due(0.0, held=False)
            for number, event in engine.step():
                self._progressed = True
                server.emit(number, event)
        server.flush()
        held = engine.waits_for_readers and server.is_behind
        wait = None if held else engine.wait_s()
        self._tell_due(wait, held=held)
        self._plan(wait)

    def _plan(self, seconds: float | None) -> None:
        self._timer.cancel()
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self._step)

    def _hear(self) -> None:
        self._heard = True
        self._plan(0.0)

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Have `run` raise the error of a callback, unless a peer could not be accepted."""
        error = context.get("exception")
        if error is None or "socket" in context or self._failed.done():
            loop.default_exception_handler(context)
        else:
            self._failed.set_exception(error)

    def _tell_due(self, wait: float | None, *, held: bool) -> None:
        """Tell when the step after `wait` is due: with requests that run there must be one.

        A step that is overdue stays so until one brings an event, whatever messages come.
        """
        if held or not self.server.running:
            self._progress.set(math.inf)
            self._progressed = True
        elif wait or self._progressed:
            self._progress.set(time.monotonic() + (wait or 0.0))
            self._progressed = False


def run_engine(engine: StepEngine | AsyncEngine, own: socket.socket, progress: SharedTime) -> None:
    """Serve `engine` from when the parent sends `Serve` by `own`, until it sends `Stop`.

    `progress` is set to when the next step of a `StepEngine` is due. Raises EOFError when the
    parent is gone, or the error that killed the engine.
    """
    if not isinstance(engine, AsyncEngine):
        # This loop waits for microseconds, which poll and epoll round up to milliseconds.
        exact = partial(asyncio.SelectorEventLoop, selectors.SelectSelector())
        with asyncio.Runner(loop_factory=exact) as runner:
            runner.run(_serve(_Steps(engine, progress), own))
        return
    try:
        engine.server = EngineServer(engine)
        engine.runner.run(_serve(engine, own))
    finally:
        engine.close()


async def _serve(engine: AsyncEngine | _Steps, own: socket.socket) -> None:
    control = await Stream.of(own)
    control.send(Opened())
    works = [asyncio.ensure_future(work) for work in (engine.run(), _obey(engine, control))]
    try:
        await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in works:
            if work.done():
                work.result()
    finally:
        engine.server.close()
        control.close()
        for work in works:
            work.cancel()
        await asyncio.wait(works)


async def _obey(engine: AsyncEngine | _Steps, control: Stream) -> None:
    """Carry out the parent's orders until it sends `Stop`; raises EOFError without it."""
    while not isinstance(order := await control.receive(), Stop):
        if isinstance(order, Serve):
            await engine.server.listen(order.address, order.generation)
        else:
            control.send(await engine.obey(order))
