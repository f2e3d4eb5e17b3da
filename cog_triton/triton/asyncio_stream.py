"""A stream of Triton's, read by an event loop, without a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Connection(Protocol):
    """What a stream waits for; see `cog_triton.triton.http_stream.HTTPStream`."""

    timeout: float

    def fileno(self) -> int:
        """What is readable once the stream may go on."""
        ...

    def expire(self) -> None:
        """Have the stream raise that nothing came in time."""
        ...


class Reading(Generic[T]):
    """What has arrived since the last look comes as one list: a slow reader costs no wake-ups.

    `items` yields None where it would wait for `connection`. A thread brings it to its first
    pause, for its turn in the engine's queue may be far; then the event loop goes on whenever
    something has come. A thread to the end would cost each token five switches of context.

    Create it on the event loop. It reads to the end whether or not anyone looks; whatever else
    ends `items` is the caller's to call.
    """

    def __init__(
        self, items: Generator[T | None, None, None], connection: Callable[[], Connection]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._items = items
        self._connection = connection
        self._descriptor: int | None = None
        self._heard_at = 0.0
        self._news = asyncio.Event()
        self._arrived: list[T] = []
        self._ended = False
        self._error: BaseException | None = None
        threading.Thread(target=self._begin, name="request", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the iterator has come to its end, or failed."""
        return self._ended

    async def next(self, timeout: float | None = None) -> list[T] | None:
        """What has arrived, at least one item; None at the end; raises what the iterator raised.

        Empty when nothing has come within `timeout` seconds.
        """
        if not self._news.is_set():
            try:
                await asyncio.wait_for(self._news.wait(), timeout)
            except asyncio.TimeoutError:
                return []
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            if not self._ended:
                self._news.clear()
            return arrived
        if self._error is not None:
            raise self._error
        return None

    def _begin(self) -> None:
        self._take()
        try:
            self._loop.call_soon_threadsafe(self._begun)
        except RuntimeError:  # the loop is closed: nobody looks any more
            self._items.close()

    def _begun(self) -> None:
        if not self._ended:
            self._descriptor = self._connection().fileno()
            self._loop.add_reader(self._descriptor, self._go_on)
            self._heard_at = self._loop.time()
            self._loop.call_later(self._connection().timeout, self._look)
        self._tell()

    def _go_on(self) -> None:
        self._heard_at = self._loop.time()
        self._take()
        self._tell()

    def _take(self) -> None:
        """All there is without waiting."""
        try:
            for item in self._items:
                if item is None:
                    return
                self._arrived.append(item)
        except BaseException as error:  # noqa: BLE001 - it is raised by `next`
            self._error = error
        self._ended = True

    def _tell(self) -> None:
        if self._ended and self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
        if self._ended or self._arrived:
            self._news.set()

    def _look(self) -> None:
        if self._ended:
            return
        left = self._heard_at + self._connection().timeout - self._loop.time()
        if left > 0:
            self._loop.call_later(left, self._look)
            return
        self._connection().expire()
        self._go_on()
