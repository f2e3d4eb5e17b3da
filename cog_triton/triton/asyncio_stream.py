"""A stream of Triton's, read by an event loop, without a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class PausableConnection(Protocol):
    """What a stream waits for; see `cog_triton.triton.http_stream.HTTPStream`."""

    timeout: float

    def fileno(self) -> int:
        """What is readable once the stream may go on."""
        ...

    def expire(self) -> None:
        """Have the stream raise that nothing came in time."""
        ...


class AsyncStreamReader(Generic[T]):
    """What has arrived since the last look comes as one list: a slow reader costs no wake-ups.

    `items` yields None where it would wait for `connection`. A thread brings it to its first
    pause, for its turn in the engine's queue may be far; then the event loop goes on whenever
    something has come. A thread to the end would cost each token five switches of context.

    Create it on the event loop. It reads to the end whether or not anyone looks; whatever else
    ends `items` is the caller's to call.
    """

    def __init__(
        self, items: Generator[T | None, None, None], connection: Callable[[], PausableConnection]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._items = items
        self._connection = connection
        self._descriptor: int | None = None
        self._last_read_at = 0.0
        self._readable = asyncio.Event()
        self._arrived: list[T] = []
        self._ended = False
        self._error: BaseException | None = None
        threading.Thread(target=self._read_until_first_pause, name="request", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the iterator has come to its end, or failed."""
        return self._ended

    async def read(self, timeout: float | None = None) -> list[T] | None:
        """What has arrived, at least one item; None at the end; raises what the iterator raised.

        Empty when nothing has come within `timeout` seconds.
        """
        if not self._readable.is_set():
            try:
                await asyncio.wait_for(self._readable.wait(), timeout)
            except asyncio.TimeoutError:
                return []
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            if not self._ended:
                self._readable.clear()
            return arrived
        if self._error is not None:
            raise self._error
        return None

    def _read_until_first_pause(self) -> None:
        self._read_available()
        try:
            self._loop.call_soon_threadsafe(self._attach_to_loop)
        except RuntimeError:  # the loop is closed: nobody looks any more
            self._items.close()

    def _attach_to_loop(self) -> None:
        if not self._ended:
            self._descriptor = self._connection().fileno()
            self._loop.add_reader(self._descriptor, self._on_readable)
            self._last_read_at = self._loop.time()
            self._loop.call_later(self._connection().timeout, self._check_timeout)
        self._notify()

    def _on_readable(self) -> None:
        self._last_read_at = self._loop.time()
        self._read_available()
        self._notify()

    def _read_available(self) -> None:
        """All there is without waiting."""
        try:
            for item in self._items:
                if item is None:
                    return
                self._arrived.append(item)
        except BaseException as error:  # noqa: BLE001 - it is raised by `read`
            self._error = error
        self._ended = True

    def _notify(self) -> None:
        if self._ended and self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
        if self._ended or self._arrived:
            self._readable.set()

    def _check_timeout(self) -> None:
        if self._ended:
            return
        left = self._last_read_at + self._connection().timeout - self._loop.time()
        if left > 0:
            self._loop.call_later(left, self._check_timeout)
            return
        self._connection().expire()
        self._on_readable()
