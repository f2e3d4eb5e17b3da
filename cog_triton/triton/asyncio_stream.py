"""Asynchronous reader of a Triton stream: an event loop reads it, not a thread a stream."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class PausableConnection(Protocol):
    """The connection that a stream waits for; see `cog_triton.triton.http_stream.HTTPStream`."""

    timeout: float

    def fileno(self) -> int:
        """File descriptor that becomes readable when the stream may continue."""
        ...

    def expire(self) -> None:
        """Make the stream raise its timeout error."""
        ...


class AsyncStreamReader(Generic[T]):
    """Reads `items` on the event loop; items that arrived since the last `read` come as one list.

    `items` yields None where it would wait for `connection`. A thread runs it to its first pause,
    since it may be queued for long before; then the event loop resumes it whenever data has
    arrived. A thread for all of it would cost each token five context switches.

    Create it on the event loop. It reads to the end whether or not `read` is called; to end it
    early, the caller must make `items` end.
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
        context = contextvars.copy_context()  # add_reader and call_later hand it on
        threading.Thread(
            target=context.run, args=[self._read_until_first_pause], name="request", daemon=True
        ).start()

    @property
    def ended(self) -> bool:
        """Whether `items` has ended or failed."""
        return self._ended

    async def read(self, timeout: float | None = None) -> list[T] | None:
        """Items that have arrived, at least one; None at the end; raises what `items` raised.

        Empty when nothing has arrived within `timeout` seconds.
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
        except RuntimeError:  # the loop is closed, and there is no reader any more
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
        """Take all items that are available without waiting."""
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
