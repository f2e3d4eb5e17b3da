"""Connections of own processes in asyncio, and who listens."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self

from cog_triton.ipc.framing import CONTROL_LIMIT, LENGTH, FrameError, check, frame
from cog_triton.ipc.messages import decode, encode
from cog_triton.system import local_socket

_log = logging.getLogger(__name__)


class Stream:
    """A connection in asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, name: str) -> Self:
        """Connect to the local socket `name`; raises OSError while nobody listens there."""
        return await cls.of(local_socket.connect(name))

    @classmethod
    async def of(cls, own: socket.socket) -> Self:
        """For a socket that is connected."""
        return cls(*await asyncio.open_unix_connection(sock=own))

    @property
    def peer_pid(self) -> int:
        """Process id of who listens at the other end."""
        return local_socket.peer_pid(self._writer.get_extra_info("socket"))

    def send(self, message: Any) -> None:
        """Queue a message, without waiting; nothing is sent to a peer that is gone."""
        self._writer.write(frame(encode(message)))

    async def receive(self) -> Any:
        """The next message; raises EOFError when the peer is gone, FrameError for none."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            check(length, CONTROL_LIMIT)
            content = await self._reader.readexactly(length)
        except FrameError:
            raise
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        return decode(content)

    def close(self) -> None:
        """Hang up, once what is queued was sent."""
        self._writer.close()


class Server:
    """Listens on a local socket, and serves each connection of our own user in a task."""

    def __init__(
        self,
        name: str,
        serve: Callable[[Stream], Awaitable[None]],
    ) -> None:
        """`serve` gets a stream, and may end by EOFError as its peer does.

        Raises OSError if another process listens on `name`.
        """
        self._name = name
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = local_socket.listen(name)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def stop(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        if (own := local_socket.accept(self._listener)) is not None:
            task = self._loop.create_task(self._serve_one(own))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve_one(self, own: socket.socket) -> None:
        stream = await Stream.of(own)
        try:
            await self._serve(stream)
        except EOFError:
            pass
        except FrameError as error:
            _log.warning("%s: from process %d: %s", self._name, stream.peer_pid, error)
        finally:
            stream.close()
