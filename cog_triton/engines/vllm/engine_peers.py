"""The host's end of its connections, for asyncio.

The other end is a `multiprocessing.connection.Connection`, whose framing this follows: a message
is pickled behind its length in four bytes.
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
    """One stub of Triton's; what is sent to it within one turn of the loop is one message."""

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
        """Send an event before the loop's next turn."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((handle, event))

    def write(self, message: Any) -> None:
        """Send a message by itself."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(content)) + content)

    def close(self) -> None:
        """Send what is left and hang up."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and not self._writer.is_closing():
            self.write(outbox)


async def adopt(connection: Connection) -> Peer:
    """The peer at the end of a connection that is there already."""
    own = socket.socket(fileno=os.dup(connection.fileno()))
    return Peer(*await asyncio.open_unix_connection(sock=own))


async def listen(name: str, welcome: Callable[[Peer], None]) -> asyncio.AbstractServer:
    """Hand every peer of our own user that connects to the socket `name` to `welcome`."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _is_ours(writer.get_extra_info("socket")):
            welcome(Peer(reader, writer))
        else:
            writer.close()

    return await asyncio.start_unix_server(accept, _address(name))


def connect(name: str) -> Connection:
    """Connect to `listen`'s socket; raises OSError while nobody listens."""
    own = socket.socket(socket.AF_UNIX)
    try:
        own.connect(_address(name))
        if not _is_ours(own):
            raise PermissionError(f"{name}: another user listens there")
    except OSError:
        own.close()
        raise
    return Connection(own.detach())


def _address(name: str) -> str:
    """In Linux's abstract namespace: no file is left behind, and no path can be too long."""
    return f"\0{name}"


def _is_ours(own: socket.socket) -> bool:
    """Whether the same user is at the other end: what comes from there is unpickled."""
    raw = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
