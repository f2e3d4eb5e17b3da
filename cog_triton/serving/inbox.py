"""Inboxes of running generations: what the engine made, for a thread or for an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from cog_triton.engines.step_items import StepItem


class Inbox(Protocol):
    """Takes items from any thread; `put(None)` only wakes the reader."""

    def put(self, item: StepItem | None) -> None:
        """Add an item; never blocks."""


_PIECE_S = 0.02
_BUSY_PER_S = 2000
_SAMPLE = 64


class ThreadInbox:
    """Inbox of one thread, which `take` blocks; it wakes once for all that has come meanwhile."""

    def __init__(self, inboxes: ThreadInboxes | None = None) -> None:
        self._inboxes = inboxes or ThreadInboxes()
        self._queue: SimpleQueue[list[StepItem | None]] = SimpleQueue()
        self.held: list[StepItem | None] = []
        self.woken_at = -math.inf

    def put(self, item: StepItem | None) -> None:
        """See `Inbox.put`."""
        self._inboxes.put(self, item)

    def wake(self, now: float) -> None:
        """Let the thread have what is held."""
        held, self.held, self.woken_at = self.held, [], now
        self._queue.put(held)

    def take(self) -> list[StepItem]:
        """Wait; the items that have come, none after a mere wake-up."""
        queue = self._queue
        arrived = queue.get()
        while not queue.empty():
            arrived = [*arrived, *queue.get_nowait()]
        return [item for item in arrived if item is not None]


class ThreadInboxes:
    """Inboxes of threads, each of which is woken once in 20 ms while all get 2000 items a second.

    To wake a thread, and to hand it the GIL, costs more than all else that is done for a token. The
    first item of an inbox, an end, and what comes 20 ms after the last are not held back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holding: list[ThreadInbox] = []
        self._holds = threading.Event()
        self._due = 0.0
        self._thread: threading.Thread | None = None
        self._count, self._since = 0, 0.0
        self._busy = False

    def new(self) -> ThreadInbox:
        """An inbox for one generation."""
        return ThreadInbox(self)

    def put(self, inbox: ThreadInbox, item: StepItem | None) -> None:
        """See `Inbox.put`."""
        now = time.monotonic()
        with self._lock:
            self._count += 1
            if self._count == _SAMPLE:
                self._busy = _BUSY_PER_S * (now - self._since) <= _SAMPLE
                self._count, self._since = 0, now
            inbox.held.append(item)
            due = inbox.woken_at + _PIECE_S
            if item is None or item.end or not self._busy or now >= due:
                inbox.wake(now)
            elif len(inbox.held) == 1:
                self._hold(inbox, due)

    def _hold(self, inbox: ThreadInbox, due: float) -> None:
        if not self._holding:
            self._due = due
            self._holds.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._release, name="pieces", daemon=True)
                self._thread.start()
        self._holding.append(inbox)

    def _release(self) -> None:
        """Wake all that hold something when the first of them is due."""
        while self._holds.wait():
            time.sleep(max(0.0, self._due - time.monotonic()))
            with self._lock:
                self._holds.clear()
                holding, self._holding = self._holding, []
                now = time.monotonic()
                for inbox in holding:
                    if inbox.held:
                        inbox.wake(now)


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
