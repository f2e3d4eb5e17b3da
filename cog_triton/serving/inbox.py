"""Inbox of a request: what the engine made of it, for its reader on the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

from cog_triton.engines.step_items import StepItem


class Inbox:
    """Items of one request; all that have come in a turn of the loop are read in the next."""

    __slots__ = ("_arrived", "_context", "_items", "_loop", "_scheduled", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: list[StepItem | None] = []
        self._scheduled = False
        self._waiter: asyncio.Future[None] | None = None
        self._arrived: Callable[[], bool] | None = None
        self._context: contextvars.Context | None = None

    def put(self, item: StepItem | None) -> None:
        """Add an item; None only wakes the reader."""
        self._items.append(item)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._wake, context=self._context)

    def _wake(self) -> None:
        self._scheduled = False
        waiter, arrived = self._waiter, self._arrived
        if waiter is None or waiter.done() or (arrived is not None and arrived()):
            return
        waiter.set_result(None)

    async def take(self, timeout: float | None = None) -> list[StepItem] | None:
        """The items that have come, none after a mere wake-up; None after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not self._items:
                    await self._woken()
        except TimeoutError:
            return None
        return self.take_now()

    def take_now(self) -> list[StepItem]:
        """The items that have come, without waiting."""
        items, self._items = self._items, []
        return [item for item in items if item is not None]

    async def handle(self, arrived: Callable[[], bool]) -> None:
        """Have `arrived` called by the loop, in this task's context, until it returns False.

        It is called when something has come, and has to take it. That is less than half of the
        cost of waking a task, which stands below all that a web framework has called.
        """
        if self._items and not arrived():
            return
        self._arrived, self._context = arrived, contextvars.copy_context()
        try:
            await self._woken()
        finally:
            self._arrived = self._context = None

    async def _woken(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
