"""Connections of the vLLM host: asyncio on its side, `multiprocessing.connection` on the stubs'."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from cog_triton.engines.request import TokenEvent
from cog_triton.engines.step_items import StepBuffer
from cog_triton.system import local_socket, message_stream


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
        self._events: list[tuple[int, Any]] = []
        self._step = StepBuffer()
        self._waiting = False

    async def receive(self) -> Any:
        """The next message; raises EOFError when the peer is gone."""
        return await message_stream.receive(self._reader)

    def sender(self, handle: int, width: int = 0) -> Callable[[Any, bool], None]:
        """What queues the events of one request, for `SendOrder.flush`.

        Its second argument is whether to flush at the event loop's next turn. `width` is the
        number of log probabilities a token.
        """
        if not self.gets_steps:

            def queue_event(event: Any, at_once: bool) -> None:
                self._events.append((handle, event))
                self._queued(at_once)

            return queue_event
        offset = 0

        def queue_item(event: TokenEvent, at_once: bool) -> None:
            nonlocal offset
            offset = self._step.add(handle, offset, event, width)
            self._queued(at_once)

        return queue_item

    def _queued(self, at_once: bool) -> None:
        if not self._waiting:
            self._waiting = True
            self._order.add(self)
        if at_once:
            self._order.flush_soon()

    def write(self, message: Any) -> None:
        """Send one message at once."""
        message_stream.send(self._writer, message)

    def flush(self) -> None:
        """Send what is queued, as one message."""
        events, self._events = self._events, []
        step, self._step = self._step, StepBuffer()
        waiting, self._waiting = self._waiting, False
        if not waiting or self._writer.is_closing():
            return
        if self.gets_steps:
            items, log_probs, errors = step.encoded()
            self.write(("step", items.tobytes(), log_probs.tobytes(), errors))
        else:
            self.write(events)

    def close(self) -> None:
        """Flush what is queued and hang up."""
        self.flush()
        self._writer.close()


async def listen(
    listener: socket.socket, on_peer: Callable[[Peer], None], order: SendOrder
) -> asyncio.AbstractServer:
    """Accept peers at `listener`; `on_peer` gets every one of our own user."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if local_socket.is_same_user(writer.get_extra_info("socket")):
            on_peer(Peer(reader, writer, order))
        else:
            writer.close()

    return await asyncio.start_unix_server(accept, sock=listener)
