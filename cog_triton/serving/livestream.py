"""Live, concurrent, cancellable streaming out of Cog 0.23.1. Delete when upstream streams.

coglet collects an async generator into a list and sends it at the end; a sync generator
streams, but only at concurrency 1. What does stream concurrently is an ``async def run``
that *returns* a sync generator, which coglet then iterates on the slot's own thread. A
cancellation reaches only the future that ``asyncio.run_coroutine_threadsafe`` gave coglet;
by then that future is done, so it is wrapped in one that cancels the generator's task.
"""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import GeneratorType
from typing import Any

from cog import CancelationException

_Item = str | BaseException | None

_cancellers: weakref.WeakKeyDictionary[Iterator[str], Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)
_run_coroutine_threadsafe = asyncio.run_coroutine_threadsafe


def install() -> None:
    """Make cancellation reach live streams in this process; idempotent."""
    asyncio.run_coroutine_threadsafe = _cancellable  # type: ignore[assignment]


def live(chunks: AsyncIterator[str]) -> Iterator[str]:
    """A sync generator of `chunks`, which run as a task of the current event loop.

    Chunks that arrive while the reader is busy come out joined. Closing or cancelling the
    generator cancels the task; an error of the task is raised by the generator.
    """
    loop = asyncio.get_running_loop()
    arrived: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    task = loop.create_task(_pump(chunks, arrived))

    def cancel() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    generator = _drain(arrived, cancel)
    _cancellers[generator] = cancel
    # Closing a generator that was never started runs none of it.
    weakref.finalize(generator, cancel).atexit = False
    return generator


async def _pump(chunks: AsyncIterator[str], arrived: queue.SimpleQueue[_Item]) -> None:
    try:
        async for chunk in chunks:
            arrived.put(chunk)
        arrived.put(None)
    except asyncio.CancelledError:
        arrived.put(CancelationException())
        raise
    except Exception as error:  # noqa: BLE001 - handed over whole, raised by the reader
        arrived.put(error)


def _drain(arrived: queue.SimpleQueue[_Item], cancel: Callable[[], None]) -> Iterator[str]:
    try:
        while True:
            items = [arrived.get()]
            while not arrived.empty():
                items.append(arrived.get())
            if text := "".join(item for item in items if isinstance(item, str)):
                yield text
            last = items[-1]
            if last is None:
                return
            if isinstance(last, BaseException):
                raise last
    finally:
        cancel()


class _CancellableFuture:
    """Stands for a coroutine's future, and for the stream that the coroutine returned."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self._cancel_stream: Callable[[], None] | None = None
        self._cancelled = False

    def result(self, timeout: float | None = None) -> Any:
        value = self._future.result(timeout)
        if isinstance(value, GeneratorType):
            self._cancel_stream = _cancellers.pop(value, None)
            if self._cancelled and self._cancel_stream:
                self._cancel_stream()
        return value

    def cancel(self) -> bool:
        self._cancelled = True
        if self._cancel_stream:
            self._cancel_stream()
            return True
        return self._future.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


def _cancellable(
    coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop
) -> _CancellableFuture:
    return _CancellableFuture(_run_coroutine_threadsafe(coroutine, loop))
