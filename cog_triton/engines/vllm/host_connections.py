"""Connections of the vLLM host: asyncio on its side, `multiprocessing.connection` on the stubs'.

The framing is that of `multiprocessing.connection`: a pickled message after its length in four
bytes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_LENGTH = struct.Struct("!i")
_CREDENTIALS = struct.Struct("3i")


class Peer:
    """Connection to one stub; events sent in one turn of the event loop share a message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._outbox: list[tuple[int, Any]] = []

    async def receive(self) -> Any:
        """The next message; raises EOFError when the peer is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def send(self, handle: int, event: Any) -> None:
        """Queue an event, to be sent at the loop's next turn."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((handle, event))

    def write(self, message: Any) -> None:
        """Send one message at once."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(content)) + content)

    def close(self) -> None:
        """Flush queued events and hang up."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and not self._writer.is_closing():
            self.write(outbox)


async def wrap_connection(connection: Connection) -> Peer:
    """Wrap an open connection as a peer."""
    own = socket.socket(fileno=os.dup(connection.fileno()))
    return Peer(*await asyncio.open_unix_connection(sock=own))


async def listen(name: str, on_peer: Callable[[Peer], None]) -> asyncio.AbstractServer:
    """Listen on the socket `name`; `on_peer` gets every peer of our own user."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _is_same_user(writer.get_extra_info("socket")):
            on_peer(Peer(reader, writer))
        else:
            writer.close()

    return await asyncio.start_unix_server(accept, _address(name))


def connect(name: str) -> Connection:
    """Connect to `listen`'s socket; raises OSError while nobody listens."""
    own = socket.socket(socket.AF_UNIX)
    try:
        own.connect(_address(name))
        if not _is_same_user(own):
            raise PermissionError(f"{name}: another user listens there")
    except OSError:
        own.close()
        raise
    return Connection(own.detach())


def _address(name: str) -> str:
    """Address in Linux's abstract namespace: leaves no file, and has no path that is too long."""
    return f"\0{name}"


def _is_same_user(own: socket.socket) -> bool:
    """Whether our own user is at the other end: messages are unpickled."""
    raw = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
