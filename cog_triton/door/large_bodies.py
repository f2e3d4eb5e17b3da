"""Work on large request bodies in a process of its own, so that it delays no other request.

python -m cog_triton.door.large_bodies DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from cog_triton import errors
from cog_triton.door.message import Refused
from cog_triton.errors import CogTritonError
from cog_triton.ipc import child
from cog_triton.ipc.child import PythonChild
from cog_triton.ipc.messages import decode_call, decode_result, encode_call, encode_result

T = TypeVar("T")
LARGE = 64 << 10
_MOST = 1 << 30
_ANSWER_S = 30.0
_RETURNED = b"R"
_RAISED = b"E"


class LargeBodies:
    """One process, started for the first large body, that takes one body after the other."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._child: PythonChild | None = None
        self._closed = False

    async def run(self, size: int, function: Callable[..., T], *arguments: object) -> T:
        """The result of `function`, called here for bodies of few bytes.

        Raises:
            Refused: 503, the process died, such as of too little memory, or does not answer.
        """
        if size < LARGE:
            return function(*arguments)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "large-bodies")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._call, function, arguments)

    def close(self) -> None:
        """Stop the process; what it works on is refused."""
        self._closed = True
        if self._child is not None:
            self._child.process.kill()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def _call(self, function: Callable[..., T], arguments: tuple[object, ...]) -> T:
        """Called on the one thread."""
        try:
            if self._child is None or not self._child.alive:
                self._stop_child()
                if self._closed:
                    raise ConnectionError("the front door is closing")
                self._child = PythonChild(__name__, timeout=_ANSWER_S)
            self._child.send(encode_call(function, arguments))
            kind, data = self._child.receive(_MOST)
        except OSError as error:
            self._stop_child()
            rule = "the process that checks large requests died or hung; try again"
            raise Refused(503, errors.Overloaded(rule)) from error
        if kind == _RAISED:
            status, text = json.loads(bytes(data))
            coded = errors.from_text(text)
            raise Refused(status, coded) if status and coded else coded or RuntimeError(text)
        return cast(T, decode_result(function, data))

    def _stop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _called(request: memoryview) -> tuple[bytes, bytes]:
    """The result of a call, or the error it raised, and the HTTP status that it is refused with."""
    function, arguments = decode_call(request)
    try:
        return _RETURNED, encode_result(function, function(*arguments))
    except Refused as error:
        raised = [error.status, str(error.error)]
    except CogTritonError as error:
        raised = [None, str(error)]
    except Exception as error:  # noqa: BLE001 - raised in the front door
        raised = [None, f"{type(error).__name__}: {error}"]
    return _RAISED, json.dumps(raised).encode()


if __name__ == "__main__":
    child.serve(int(sys.argv[1]), _called)
