"""Live streaming of an async generator through today's Cog, which would collect it into a list.

The original cog-triton had an older Cog, which streamed async generators. So that only the
algorithm differs, this baseline is streamed as ours is, from a thread that the event loop hands
its pieces to; they are made on one event loop, as the original's were.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any, cast

from cog_triton.serving.coglet import streaming


def live(
    loop: asyncio.AbstractEventLoop, pieces: AsyncIterator[str], finish: Callable[[], None]
) -> Iterator[str]:
    """Iterator of `pieces`, which are made on `loop`, for Cog's thread.

    `finish` is called after the last one, in its context.
    """
    arrived: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

    async def pump() -> None:
        try:
            async for piece in pieces:
                arrived.put(piece)
        except BaseException as error:  # noqa: BLE001 - it is raised where the pieces are read
            arrived.put(error)
        else:
            arrived.put(None)

    task = asyncio.run_coroutine_threadsafe(pump(), loop)

    def read(_: None, hangup: streaming.Hangup) -> Generator[str, None, None]:
        hangup.set(cast(Any, SimpleNamespace(shutdown=lambda _: task.cancel())))
        while (piece := arrived.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        finish()

    return streaming.cancellable(read, None)
