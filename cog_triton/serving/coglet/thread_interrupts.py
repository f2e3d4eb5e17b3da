"""Workaround: no asynchronous exceptions of Cog 0.23.1 in prediction threads.

Until coglet has a prediction's future, a cancellation raises CancelationException in the
prediction's thread (PyThreadState_SetAsyncExc), and waits for the GIL before it does. By then the
thread generates, and the exception comes at any instruction: between the acquisition of a
condition's lock and the block that would release it, for example, so that every later request
waits for ever.

coglet learns the thread from ``threading.get_ident()``, which it calls without a Python frame. Such
a caller gets an identifier that no thread has, and coglet logs that the thread was not found. So a
client that leaves in the first moments of a prediction does not end it: it is generated to its end.
"""

from __future__ import annotations

import sys
import threading

NO_THREAD = 0
_original_get_ident = threading.get_ident


def disable() -> None:
    """Patch threading so that coglet interrupts no thread of this process; idempotent."""
    threading.get_ident = _get_ident


def _get_ident() -> int:
    """Identifier of the calling thread; NO_THREAD for callers that are not Python code."""
    try:
        sys._getframe(1)
    except ValueError:
        return NO_THREAD
    return _original_get_ident()
