"""A listening socket of the front door, which outlives a lack of descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from cog_triton.errors import Overloaded

BACKLOG = 4096
# Of a burst, the first are served while the rest wait to be accepted.
_AT_ONCE = 16
_RETRY_S = 0.5
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG = logging.getLogger(__name__)


class Listener:
    """Accepts connections on a socket; makes a protocol of `factory` for each."""

    def __init__(self, listening: socket.socket, factory: Callable[[], asyncio.Protocol]) -> None:
        listening.setblocking(False)
        self._socket = listening
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:
                    self._pause(error)
                    return
                continue  # a client that has left already
            task = self._loop.create_task(self._connect(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._factory, accepted)
        except OSError:
            accepted.close()

    def _pause(self, error: OSError) -> None:
        """Leave new connections in the backlog until others have ended."""
        _LOG.error("%s", Overloaded(f"no connection can be accepted: {error.strerror}"))
        self._loop.remove_reader(self._socket)
        self._loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)
