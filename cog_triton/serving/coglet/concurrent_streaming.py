"""Workarounds: concurrent, cancellable streaming out of Cog 0.23.1. Delete when upstream streams.

coglet collects an async generator into a list and sends it at the end; a sync generator
streams, but only at concurrency 1. What does stream concurrently is an ``async def run``
that *returns* a sync generator, which coglet then iterates on the slot's own thread. A
cancellation reaches only the future that ``asyncio.run_coroutine_threadsafe`` gave coglet;
by then that future is done. So coglet gets one of ours, which cancels the stream. It also
saves each prediction the round trip to the event loop: a ``run`` that only returns its
stream awaits nothing, and so is run on the calling thread.

Until coglet has a prediction's future, a cancellation raises CancelationException in the
prediction's thread (PyThreadState_SetAsyncExc), and waits for the GIL before it does. By then the
thread generates, and the exception comes at any instruction: between the acquisition of a
condition's lock and the block that would release it, for example, so that every later request
waits for ever. coglet learns the thread from ``threading.get_ident()``, which it calls without a
Python frame. Such a caller gets an identifier that no thread has, and coglet logs that the thread
was not found. So a client that leaves in the first moments of a prediction does not end it: it is
generated to its end.
"""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from types import GeneratorType
from typing import Any

from cog import CancelationException

from cog_triton.serving.coglet import prediction_directory

Chunks = Generator[str, None, None]

_cancellers: weakref.WeakKeyDictionary[Iterator[str], Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)
_original_run_coroutine_threadsafe = asyncio.run_coroutine_threadsafe
_PREDICTION_COROUTINE = "_ctx_wrapper"
"""Name of the coroutine that coglet wraps each prediction in."""
NO_THREAD = 0
_original_get_ident = threading.get_ident


def disable_interrupts() -> None:
    """Patch threading so that coglet interrupts no thread of this process; idempotent."""
    threading.get_ident = _get_ident


def _get_ident() -> int:
    """Identifier of the calling thread; NO_THREAD for callers that are not Python code."""
    try:
        sys._getframe(1)
    except ValueError:
        return NO_THREAD
    return _original_get_ident()


def install(run: Callable[..., Any]) -> None:
    """Patch asyncio so that cancellation reaches streams in this process; idempotent.

    `run` is the predictor's method. coglet resolves its annotations for each prediction, to
    find files among its inputs; there are none, so that is turned off. For each piece it imports
    builtins (PyImport_Import without a frame), whose spec lacks the attribute that says whether it
    is loaded, as only those of loaded modules have it: an AttributeError a piece.
    """
    run.__no_type_check__ = True  # type: ignore[attr-defined]
    vars(builtins.__spec__)["_initializing"] = False
    asyncio.run_coroutine_threadsafe = _patched_run_coroutine_threadsafe  # type: ignore[assignment]


def prediction_id() -> str:
    """Cog's id of the prediction in the current context; ``""`` outside of one."""
    values = contextvars.copy_context().items()
    return next((str(value) for key, value in values if key.name == "_coglet_prediction_id"), "")


def cancellable_stream(chunks: Chunks, cancel: Callable[[], None]) -> Iterator[str]:
    """A stream of `chunks` for coglet to iterate, in the caller's context, so that print() and
    metrics belong to the prediction.

    When the prediction is cancelled, `cancel` is called on another thread; it must make
    `chunks` end or raise, and what they raise becomes Cog's CancelationException.
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


class _CompletedFuture:
    """The part of a Future that coglet uses, for a prediction's coroutine run on `result`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._cancel_stream: Callable[[], None] | None = None
        self._cancelled = False

    def result(self) -> Any:
        prediction_id = inspect.getcoroutinelocals(self._coroutine).get("prediction_id", "")
        try:
            contextvars.copy_context().run(self._coroutine.send, None)
        except StopIteration as ended:
            value = ended.value
        except Exception:
            prediction_directory.remove(prediction_id)
            raise
        else:
            self._coroutine.close()
            raise RuntimeError("run() must not wait for anything: its stream may")
        if isinstance(value, GeneratorType):
            # However it ends, one that is never begun included.
            weakref.finalize(value, prediction_directory.remove, prediction_id)
            self._cancel_stream = _cancellers.pop(value, None)
            if self._cancelled and self._cancel_stream:
                self._cancel_stream()
        return value

    def cancel(self) -> bool:
        self._cancelled = True
        if self._cancel_stream:
            self._cancel_stream()
        return True


def _patched_run_coroutine_threadsafe(
    coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop
) -> Any:
    if getattr(coroutine, "__name__", "") == _PREDICTION_COROUTINE:
        return _CompletedFuture(coroutine)
    return _original_run_coroutine_threadsafe(coroutine, loop)
