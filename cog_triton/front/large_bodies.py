"""Work on large request bodies in a process of its own, so that it delays no other request.

python -m cog_triton.front.large_bodies DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from cog_triton import errors
from cog_triton.front.message import Refused
from cog_triton.ipc import child
from cog_triton.ipc.child import PythonChild

T = TypeVar("T")
LARGE = 64 << 10
_ANSWER_S = 30.0


class LargeBodies:
    """One process, started for the first large body, that takes one body after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self._child: PythonChild | None = None
        self._closed = False

    async def run(self, size: int, function: Callable[..., T], *arguments: object) -> T:
        """The result of `function`, called here for bodies of few bytes.

        Raises:
            Refused: 503, the process died, such as of too little memory, or does not answer.
        """
        if size < LARGE:
            return function(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._call, function, arguments)

    def close(self) -> None:
        """Stop the process; what it works on is refused."""
        self._closed = True
        if self._child is not None:
            self._child.process.kill()
        self._thread.shutdown(cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def _call(self, function: Callable[..., T], arguments: tuple[object, ...]) -> T:
        """Called on the one thread."""
        try:
            if self._child is None or not self._child.alive:
                self._stop_child()
                if self._closed:
                    raise ConnectionError("the server is closing")
                self._child = PythonChild(__name__, timeout=_ANSWER_S)
            return cast(T, child.call(self._child, function, *arguments))
        except OSError as error:
            self._stop_child()
            rule = "the process that checks large requests died or hung; try again"
            raise Refused(503, errors.Overloaded(rule)) from error

    def _stop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


if __name__ == "__main__":
    child.serve_calls(int(sys.argv[1]))
