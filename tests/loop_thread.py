"""An event loop on a thread, as the server's is, for tests that block."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from functools import partial
from typing import Any

from anyio.from_thread import start_blocking_portal

_stack = ExitStack()
PORTAL = _stack.enter_context(start_blocking_portal())
atexit.register(_stack.close)
call = PORTAL.call
"""Calls a function on the loop; its result, which a coroutine function's is awaited for."""


class OnLoop:
    """An object whose methods are called on the loop."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.own, name)
        return partial(call, value) if callable(value) else value
