"""Messages of control between own processes, as JSON that is checked by the types of their fields.

msgspec's own formats refuse lone surrogates, which environments and paths can have.
"""

from __future__ import annotations

import asyncio
import json
import socket
from functools import reduce
from operator import or_
from typing import Any, Self

import msgspec

from cog_triton import errors
from cog_triton.ipc.framing import CONTROL_LIMIT, LENGTH, FrameError, check, frame


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all, each known by the name of its class; an error crosses as its text."""


def encode(sent: Message) -> bytes:
    """A message as the payload of a frame."""
    return json.dumps(msgspec.to_builtins(sent, str_keys=True, enc_hook=str)).encode()


def decode(payload: bytes, kinds: Any = None) -> Any:
    """The message of a payload; raises FrameError for none, or none of the union `kinds`.

    Without `kinds`, it may be any that this process has imported.
    """
    known = kinds or reduce(or_, Message.__subclasses__())
    try:
        return msgspec.convert(json.loads(payload), known, str_keys=True, dec_hook=_error)
    except ValueError as error:
        raise FrameError(f"a malformed message: {error}"[:300]) from error


def _error(_: type, text: Any) -> errors.CogTritonError:
    return errors.from_text(text) or errors.TritonUnknownError(text)


class Stream:
    """A connection of own processes in asyncio, which carries messages."""

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
