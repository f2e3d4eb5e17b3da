"""Connections of own processes in asyncio."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Self

from cog_triton.ipc.framing import CONTROL_LIMIT, LENGTH, check, frame
from cog_triton.ipc.messages import decode, encode


class Stream:
    """A connection in asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, own: socket.socket) -> Self:
        """For a socket that is connected."""
        return cls(*await asyncio.open_unix_connection(sock=own))

    def send(self, message: Any) -> None:
        """Queue a message, without waiting; nothing is sent to a peer that is gone."""
        self._writer.write(frame(encode(message)))

    async def receive(self) -> Any:
        """The next message; raises EOFError when the peer is gone, FrameError for none."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            check(length, CONTROL_LIMIT)
            return decode(await self._reader.readexactly(length))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def close(self) -> None:
        """Hang up, once what is queued was sent."""
        self._writer.close()
