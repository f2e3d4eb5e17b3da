"""Inboxes of running generations: what the engine made, for an event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Protocol

from cog_triton.engines.step_items import StepItem


class Inbox(Protocol):
    """Takes items from any thread; `put(None)` only wakes the reader."""

    def put(self, item: StepItem | None) -> None:
        """Add an item; never blocks."""


class LoopInboxes:
    """Inboxes of one event loop: all that get items of a step are woken in one turn of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._to_wake: deque[LoopInbox] = deque()
        self._scheduled = False

    def new(self) -> LoopInbox:
        """An inbox for one generation, to be read on this loop."""
        return LoopInbox(self, self._loop)

    def wake(self, inbox: LoopInbox) -> None:
        """Wake the reader of an inbox at the loop's next turn, from any thread."""
        self._to_wake.append(inbox)
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._wake_all)
            except RuntimeError:
                self._to_wake.clear()  # the loop is closed, and there are no readers any more

    def _wake_all(self) -> None:
        self._scheduled = False
        while self._to_wake:
            self._to_wake.popleft().wake()


class LoopInbox:
    """Inbox that a coroutine of the event loop reads."""

    __slots__ = ("_handle", "_inboxes", "_items", "_loop", "_pending", "_waiter")

    def __init__(self, inboxes: LoopInboxes, loop: asyncio.AbstractEventLoop) -> None:
        self._inboxes = inboxes
        self._loop = loop
        self._items: deque[StepItem | None] = deque()
        self._pending = False
        self._waiter: asyncio.Future[None] | None = None
        self._handle: Callable[[], bool] | None = None

    def put(self, item: StepItem | None) -> None:
        """See `Inbox.put`."""
        self._items.append(item)
        if not self._pending:
            self._pending = True
            self._inboxes.wake(self)

    def wake(self) -> None:
        """Wake the reader; on the loop."""
        self._pending = False
        waiter, handle = self._waiter, self._handle
        if waiter is None or waiter.done() or (handle is not None and handle()):
            return
        waiter.set_result(None)

    async def take(self, timeout: float | None = None) -> list[StepItem] | None:
        """The items that have come, none after a mere wake-up; None after `timeout` seconds."""
        items, loop = self._items, self._loop
        deadline = None if timeout is None else loop.time() + timeout
        while not items:
            if deadline is not None and loop.time() >= deadline:
                return None
            self._waiter = loop.create_future()
            timer = None if deadline is None else loop.call_at(deadline, self.wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return self.take_now()

    def take_now(self) -> list[StepItem]:
        """The items that have come, without waiting; on the loop."""
        items = self._items
        arrived: list[StepItem] = []
        while items:
            item = items.popleft()
            if item is not None:
                arrived.append(item)
        return arrived

    async def handle(self, arrived: Callable[[], bool]) -> None:
        """Have `arrived` called on the loop, in this task's context, until it returns False.

        It is called when something has come, and has to take it. That is less than half of what
        waking a task costs, which stands below all that a web framework has called.
        """
        if self._items and not arrived():
            return
        context = contextvars.copy_context()
        self._handle = lambda: context.run(arrived)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._handle = self._waiter = None
