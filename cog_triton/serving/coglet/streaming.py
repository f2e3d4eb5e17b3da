"""Workarounds: cancellable streams out of Cog 0.23.1. Delete when coglet streams generators.

An async generator is collected by coglet and sent at its end. An ``async def run`` that *returns* a
sync generator streams concurrently, on the slot's own thread. Four things are missing then:

- A cancellation reaches only the future of ``asyncio.run_coroutine_threadsafe``, which is done once
  run() has returned. So coglet gets a future whose cancel() hangs up on the server.
- Until coglet has that future, it raises CancelationException in the prediction's thread by
  PyThreadState_SetAsyncExc. That waits for the GIL, and the thread may run another prediction by
  then. coglet learns the thread from ``threading.get_ident()``, called without a Python frame: such
  a caller gets an identifier that no thread has. The server cancels these predictions by their id.
- Directories of a prediction are left.
- For each piece coglet imports builtins without a frame, whose spec lacks an attribute that it
  asks for: an AttributeError a piece. And it resolves run()'s annotations for each prediction.
"""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import inspect
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from typing import Any

from cog import CancelationException

from cog_triton.serving.coglet import cog_server

_PREDICTION_COROUTINE = "_ctx_wrapper"
"""Name of the coroutine that coglet wraps each prediction in."""
_submit = asyncio.run_coroutine_threadsafe
_get_ident = threading.get_ident


class Hangup:
    """Ends a connection from another thread, now or as soon as it is set."""

    def __init__(self) -> None:
        self.done = False
        self._socket: socket.socket | None = None

    def set(self, own: socket.socket) -> None:
        self._socket = own
        if self.done:
            self()

    def __call__(self) -> None:
        self.done = True
        if self._socket is not None:
            with suppress(OSError):  # closed already
                self._socket.shutdown(socket.SHUT_RDWR)


_hangups: weakref.WeakKeyDictionary[Iterator[str], Hangup] = weakref.WeakKeyDictionary()


def install(run: Callable[..., Any]) -> None:
    """Patch this process; `run` is the predictor's method, whose inputs hold no files."""
    run.__no_type_check__ = True  # type: ignore[attr-defined]
    vars(builtins.__spec__)["_initializing"] = False
    threading.get_ident = _ident_of_python
    asyncio.run_coroutine_threadsafe = _run_coroutine_threadsafe  # type: ignore[assignment]


def prediction_id() -> str:
    """Cog's id of the prediction in the current context; ``""`` outside of one."""
    values = contextvars.copy_context().items()
    return next((str(value) for key, value in values if key.name == "_coglet_prediction_id"), "")


def cancellable(
    forward: Callable[[Any, Hangup], Generator[str, None, None]], order: Any
) -> Iterator[str]:
    """The stream of `forward` in the caller's context, so that print() is the prediction's log."""
    hangup = Hangup()
    stream = _iterate(forward(order, hangup), contextvars.copy_context(), hangup)
    _hangups[stream] = hangup
    return stream


def _iterate(
    chunks: Generator[str, None, None], context: contextvars.Context, hangup: Hangup
) -> Iterator[str]:
    try:
        while (chunk := context.run(next, chunks, None)) is not None:
            yield chunk
    except Exception:
        if hangup.done:
            raise CancelationException from None
        raise
    finally:
        context.run(chunks.close)


class _CompletedFuture:
    """The part of a Future that coglet uses; `result` runs a prediction's coroutine.

    That awaits nothing, so it needs no round trip to the event loop.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._hangup: Hangup | None = None
        self._cancelled = False

    def result(self) -> Any:
        """The stream that run() has returned."""
        name = inspect.getcoroutinelocals(self._coroutine).get("prediction_id", "")
        try:
            contextvars.copy_context().run(self._coroutine.send, None)
        except StopIteration as ended:
            stream = ended.value
        except Exception:
            cog_server.remove(name)
            raise
        else:
            self._coroutine.close()
            raise RuntimeError("run() must not wait for anything: its stream may")
        weakref.finalize(stream, cog_server.remove, name)  # one that is never begun included
        self._hangup = _hangups[stream]
        if self._cancelled:
            self._hangup()
        return stream

    def cancel(self) -> bool:
        """Hang up on the server."""
        self._cancelled = True
        if self._hangup is not None:
            self._hangup()
        return True


def _run_coroutine_threadsafe(
    coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop
) -> Any:
    if getattr(coroutine, "__name__", "") == _PREDICTION_COROUTINE:
        return _CompletedFuture(coroutine)
    return _submit(coroutine, loop)


def _ident_of_python() -> int:
    try:
        sys._getframe(1)
    except ValueError:
        return 0
    return _get_ident()
