"""Work on large request bodies in a process of its own, so that it delays no other request."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from cog_triton import errors
from cog_triton.door.message import Refused

T = TypeVar("T")
_LARGE = 64 << 10


class LargeBodies:
    """One process, started for the first large body, that takes one body after the other."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, size: int, function: Callable[..., T], *arguments: object) -> T:
        """The result of `function`, called here for bodies of few bytes.

        Raises:
            Refused: 503, the process died, such as of too little memory.
        """
        if size < _LARGE:
            return function(*arguments)
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        pool = self._pool
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, function, *arguments)
        except BrokenProcessPool as error:
            if self._pool is pool:
                self._pool = None
            rule = "the process that checks large requests died; try again"
            raise Refused(503, errors.Overloaded(rule)) from error

    def close(self) -> None:
        """Stop the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
