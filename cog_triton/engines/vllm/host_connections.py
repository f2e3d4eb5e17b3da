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

from cog_triton.engines.request import TokenEvent
from cog_triton.engines.step_items import StepItem, encode, item_of
from cog_triton.system import local_socket

_LENGTH = struct.Struct("!i")


class SendOrder:
    """Send order: peers with queued messages, step guests before all others."""

    def __init__(self) -> None:
        self._waiting: list[Peer] = []
        self._scheduled = False

    def add(self, peer: Peer) -> None:
        """Add a peer that has something to send."""
        self._waiting.append(peer)

    def flush_soon(self) -> None:
        """Flush at the event loop's next turn."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_scheduled)

    def flush(self) -> None:
        """Send what is queued: one message to each peer."""
        waiting, self._waiting = self._waiting, []
        for of_steps in (True, False):
            for peer in waiting:
                if peer.gets_steps is of_steps:
                    peer.flush()

    def _flush_scheduled(self) -> None:
        self._scheduled = False
        self.flush()


class Peer:
    """Connection to one stub; gets events, or step items once it has said so."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, order: SendOrder
    ) -> None:
        self.gets_steps = False
        self._reader = reader
        self._writer = writer
        self._order = order
        self._outbox: list[Any] = []

    async def receive(self) -> Any:
        """The next message; raises EOFError when the peer is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def packer(self, handle: int, width: int) -> Callable[[Any], Any]:
        """What makes one request's events entries of this peer's queue.

        `width` is the number of log probabilities a token, 0 or 1.
        """
        if not self.gets_steps:
            return lambda event: (handle, event)
        offset = 0

        def item(event: TokenEvent) -> StepItem:
            nonlocal offset
            made = item_of(handle, offset, event, width)
            offset += len(made.ids)
            return made

        return item

    def queue(self, entry: Any, *, at_once: bool) -> None:
        """Queue what `packer` made, for `SendOrder.flush` or, `at_once`, the loop's next turn."""
        if not self._outbox:
            self._order.add(self)
        self._outbox.append(entry)
        if at_once:
            self._order.flush_soon()

    def write(self, message: Any) -> None:
        """Send one message at once."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(content)) + content)

    def flush(self) -> None:
        """Send what is queued, as one message."""
        outbox, self._outbox = self._outbox, []
        if not outbox or self._writer.is_closing():
            return
        if self.gets_steps:
            items, log_probs, errors = encode(outbox)
            self.write(("step", items.tobytes(), log_probs.tobytes(), errors))
        else:
            self.write(outbox)

    def close(self) -> None:
        """Flush what is queued and hang up."""
        self.flush()
        self._writer.close()


async def wrap_connection(connection: Connection, order: SendOrder) -> Peer:
    """Wrap an open connection as a peer."""
    own = socket.socket(fileno=os.dup(connection.fileno()))
    return Peer(*await asyncio.open_unix_connection(sock=own), order)


async def listen(
    name: str, on_peer: Callable[[Peer], None], order: SendOrder
) -> asyncio.AbstractServer:
    """Listen on the socket `name`; `on_peer` gets every peer of our own user."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if local_socket.is_same_user(writer.get_extra_info("socket")):
            on_peer(Peer(reader, writer, order))
        else:
            writer.close()

    return await asyncio.start_unix_server(accept, local_socket.address(name))
