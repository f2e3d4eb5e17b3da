"""Live, concurrent, cancellable streaming out of Cog 0.23.1. Delete when upstream streams.

coglet collects an async generator into a list and sends it at the end; a sync generator
streams, but only at concurrency 1. What does stream concurrently is an ``async def run``
that *returns* a sync generator, which coglet then iterates on the slot's own thread. A
cancellation reaches only the future that ``asyncio.run_coroutine_threadsafe`` gave coglet;
by then that future is done, so it is wrapped in one that cancels the stream.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from types import GeneratorType
from typing import Any

from cog import CancelationException

Chunks = Generator[str, None, None]

_cancellers: weakref.WeakKeyDictionary[Iterator[str], Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)
_run_coroutine_threadsafe = asyncio.run_coroutine_threadsafe


def install() -> None:
    """Make cancellation reach live streams in this process; idempotent."""
    asyncio.run_coroutine_threadsafe = _cancellable  # type: ignore[assignment]


def prediction_id() -> str:
    """Cog's id of the prediction that this code runs for; ``""`` outside of one."""
    values = contextvars.copy_context().items()
    return next((str(value) for key, value in values if key.name == "_coglet_prediction_id"), "")


def live(chunks: Chunks, cancel: Callable[[], None]) -> Iterator[str]:
    """`chunks`, for coglet to iterate, in the caller's context: its print() and its metrics
    belong to the prediction.

    When the prediction is cancelled, `cancel` is called on another thread; it must make
    `chunks` end or raise, and what it raises becomes Cog's CancelationException.
    """
    cancelled = threading.Event()

    def stop() -> None:
        cancelled.set()
        cancel()

    stream = _iterate(chunks, contextvars.copy_context(), cancelled)
    _cancellers[stream] = stop
    return stream


def _iterate(
    chunks: Chunks, context: contextvars.Context, cancelled: threading.Event
) -> Iterator[str]:
    try:
        while (chunk := context.run(next, chunks, None)) is not None:
            yield chunk
    except Exception:
        if cancelled.is_set():
            raise CancelationException from None
        raise
    finally:
        context.run(chunks.close)


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
