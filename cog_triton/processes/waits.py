"""Waits for the first of several events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def first_done(
    *waits: Coroutine[Any, Any, Any], seconds: float | None = None
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """The tasks of `waits` when one of them is done, or after so many seconds; cancels the rest."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
