"""Loop of an engine that computes on its own: its library's asyncio loop, in which it is served."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from cog_triton.engines.engine_orders import Stop
from cog_triton.engines.engine_server import EngineServer
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import CogTritonError
from cog_triton.ipc.connection import Connection
from cog_triton.system.log_format import request_id

_PERIOD_S = 0.1


class AsyncEngine(ABC):
    """Engine whose library computes on its own: a task starts each request, outputs are emitted.

    `loop` is the event loop in which it was opened, and is served.
    """

    max_batch_size: int
    server: EngineServer

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._flushing = False

    @abstractmethod
    async def start(self, number: int, request: Any) -> None:
        """Start one request, or make all of it; what it raises ends it as `coded_error` says."""

    @abstractmethod
    def abort(self, number: int) -> None:
        """Stop the library's work on a request, if it has any."""

    @abstractmethod
    def coded_error(self, error: Exception) -> CogTritonError:
        """The coded error of what the library raised."""

    @abstractmethod
    def shutdown(self, *, ordered: bool) -> None:
        """End the library's engine, as the server has `ordered`, or since something has died."""

    def kv_cache(self) -> KVCacheStats | None:
        """See `ServedEngine.kv_cache`."""
        return None

    async def watch(self) -> None:
        """Wait for the library's engine to die; raises the error that killed it."""
        await asyncio.Event().wait()

    async def obey(self, order: Any) -> Any:
        """Answer an order of the server's; raises TypeError if it takes none."""
        raise TypeError(f"{order!r}: this engine takes orders to stop alone")

    def submit(self, number: int, request: Any) -> None:
        """See `ServedEngine.submit`."""
        task = self._tasks[number] = self.loop.create_task(self._start(number, request))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    def cancel(self, number: int) -> None:
        """See `ServedEngine.cancel`: it ends at once."""
        self.emit(number, TokenEvent([], [], "cancelled"))
        self.abort(number)  # before the task, which may just be adding it
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def emit(self, number: int, event: Any, *, at_once: bool = True) -> None:
        """Emit an event, at the loop's next turn, or with the next `EngineServer.flush`."""
        self.server.emit(number, event)
        if at_once:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Send what was emitted at the loop's next turn."""
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self.server.flush()

    async def _start(self, number: int, request: Any) -> None:
        request_id.set(str(number))  # of this task alone
        try:
            await self.start(number, request)
        except Exception as error:  # noqa: BLE001 - the client must get whatever it is
            self.emit(number, TokenEvent([], [], error=self.coded_error(error)))

    def serve(self, control: Connection) -> None:
        """Serve from when `control` brings `Serve`, until it asks to stop.

        Raises EOFError when `control` hangs up, or the error that killed the engine.
        """
        ordered = False
        try:
            self.loop.run_until_complete(self._serve(control))
            ordered = True
        finally:
            self.close(ordered=ordered)

    def close(self, *, ordered: bool) -> None:
        """End the library's engine, see `shutdown`, and all tasks of the loop."""
        self.shutdown(ordered=ordered)
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left))
        self.loop.close()

    async def _serve(self, control: Connection) -> None:
        orders: asyncio.Queue[Any] = asyncio.Queue()
        self.server = EngineServer(self, self.loop, control, orders.put_nowait)
        obeying = self.loop.create_task(self._obey(control, orders))
        watching = self.loop.create_task(self.watch())
        telling = self.loop.create_task(self._tell_stats())
        try:
            await asyncio.wait({obeying, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and isinstance(error := watching.exception(), Exception):
                self.server.fail_all(self.coded_error(error))
            for task in (watching, obeying):
                if task.done():
                    task.result()
        finally:
            self.server.close()
            tasks = [obeying, watching, telling, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _obey(self, control: Connection, orders: asyncio.Queue[Any]) -> None:
        """Carry out the server's orders until it asks to stop; raises EOFError without it."""
        while not isinstance(order := await orders.get(), Stop):
            if isinstance(order, Exception):
                raise order
            control.send(await self.obey(order))

    async def _tell_stats(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.server.tell_stats()
