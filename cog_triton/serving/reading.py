"""A blocking iterator read on a thread of its own, for an event loop that must not block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Reading(Generic[T]):
    """What has arrived since the last look comes as one list: a slow reader costs no wake-ups.

    Create it on the event loop. It reads to the end whether or not anyone looks; whatever else
    ends `items` is the caller's to call.
    """

    def __init__(self, items: Callable[[], Iterator[T]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._told = False
        self._arrived: list[T] = []
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        threading.Thread(target=self._read, args=[items], name="request", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the iterator has come to its end, or failed."""
        return self._ended

    async def next(self, timeout: float | None = None) -> list[T] | None:
        """What has arrived, at least one item; None at the end; raises what the iterator raised.

        Empty when nothing has come within `timeout` seconds.
        """
        while await self._wait(timeout):
            with self._lock:
                arrived, self._arrived, self._told = self._arrived, [], False
                ended = self._ended
                if not ended:
                    self._news.clear()
            if arrived:
                return arrived
            if ended and self._error is not None:
                raise self._error
            if ended:
                return None
        return []

    async def _wait(self, timeout: float | None) -> bool:
        if timeout is None:
            await self._news.wait()
            return True
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout)
        return self._news.is_set()

    def _read(self, items: Callable[[], Iterator[T]]) -> None:
        try:
            for item in items():
                with self._lock:
                    self._arrived.append(item)
                    tell, self._told = not self._told, True
                if tell:
                    self._tell()
        except BaseException as error:  # noqa: BLE001 - it is raised by `next`
            self._error = error
        with self._lock:
            self._ended = True
        self._tell()

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody looks any more
            self._loop.call_soon_threadsafe(self._news.set)
