"""The server's Unix socket: takes orders of Cog's worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, cast

from cog_triton.ipc.framing import FrameDecoder, FrameError, frame
from cog_triton.ipc.messages import decode
from cog_triton.serving.cog_messages import CANCELLED, END, ERROR, Order
from cog_triton.serving.openai.error_responses import to_coded_error
from cog_triton.serving.predictions import Prediction
from cog_triton.system import local_socket

Obey = Callable[[Any, "Exchange"], Coroutine[Any, Any, None]]
_BACKLOG = 1024
_log = logging.getLogger(__name__)


class Exchange(asyncio.Protocol):
    """One connection: an order, and the frames that answer it."""

    def __init__(self, obey: Obey) -> None:
        self._obey = obey
        self._decoder = FrameDecoder()
        self._task: asyncio.Task[None] | None = None
        self._waiting = b""
        self.prediction = Prediction()
        """Cancelled once the peer has hung up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users: orders are for our own processes."""
        self._transport = cast(asyncio.Transport, transport)
        if not local_socket.is_same_user(transport.get_extra_info("socket")):
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Obey the order, once it is whole."""
        try:
            for payload in self._decoder.feed(data):
                if self._task is None:
                    self._task = asyncio.ensure_future(self._obey(decode(payload, Order), self))
                    self._task.add_done_callback(self._on_end)
        except FrameError as error:
            _log.warning("an order is refused: %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.prediction.cancel()

    def send(self, kind: bytes, text: str = "", *, waits: bool = False) -> None:
        """Send a frame, now or with the next one; nothing is sent to a peer that has hung up.

        A write wakes a thread of Cog's worker, which costs more than all else that is done here.
        """
        self._waiting += frame(kind + text.encode("utf-8", "surrogatepass"))
        if not (waits or self._transport.is_closing()):
            self._transport.write(self._waiting)
            self._waiting = b""

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = task.exception()
        if self.prediction.cancelled:
            self.send(CANCELLED)
        elif error is not None:
            self.send(ERROR, str(to_coded_error(error)))
        else:
            self.send(END)
        self._transport.close()


async def listen(address: str, obey: Obey) -> asyncio.Server:
    """Take orders at `address`; raises OSError if another process does."""
    return await asyncio.get_running_loop().create_unix_server(
        lambda: Exchange(obey), sock=local_socket.listen(address), backlog=_BACKLOG
    )
