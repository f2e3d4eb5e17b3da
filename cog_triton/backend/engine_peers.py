"""Peers of an engine process: stubs that submit requests and receive events.

Sending never blocks the engine: what a peer has not read waits, and is coalesced when it grows.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

from cog_triton.backend.engine_client import coalesce_events
from cog_triton.engines import step_items
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import TokenEvent

_LENGTH = struct.Struct("!i")  # framing of multiprocessing.connection
_MAX_FRAME = 2**31 - 1
_MAX_WAITING = 4096


class Running:
    """A request of a peer: `handle` is the peer's number, `sent` counts its tokens."""

    __slots__ = ("handle", "peer", "sent", "width")

    def __init__(self, peer: Peer, handle: int, width: int) -> None:
        self.peer = peer
        self.handle = handle
        self.width = width
        self.sent = 0


class Peer:
    """Connection to a stub that gets lists of (handle, event).

    `numbers` are the engine's handles by those of the peer. One that `wants_stats` is told of the
    KV cache; `told_stats` is what it knows.
    """

    wants_stats = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.told_stats: KVCacheStats | None = None
        self.numbers: dict[int, int] = {}
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._unsent = memoryview(b"")
        self._events: list[tuple[int, TokenEvent]] = []

    @property
    def is_behind(self) -> bool:
        """Whether the peer has not read all that was sent."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """Descriptor, for select."""
        return self.connection.fileno()

    def add(self, running: Running, event: TokenEvent) -> None:
        """Queue an event for `flush`."""
        self._events.append((running.handle, event))

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it; raises OSError at a hang-up."""
        if self._unsent:
            self._write()
        if self._unsent:
            self._compact()
        elif (message := self._take()) is not None:
            self.send(message)

    def send(self, message: Any) -> None:
        """Send a message now, behind what is still unsent; raises OSError at a hang-up."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(content) > _MAX_FRAME:
            head = _LENGTH.pack(-1) + struct.pack("!Q", len(content))
        else:
            head = _LENGTH.pack(len(content))
        self._unsent = memoryview(bytes(self._unsent) + head + content)
        self._write()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        self.connection.close()

    def _take(self) -> Any:
        """The message that holds all that is queued, None if nothing is."""
        events, self._events = self._events, []
        return events or None

    def _compact(self) -> None:
        """Coalesce what is queued once it has grown."""
        if len(self._events) > _MAX_WAITING:
            self._events = list(coalesce_events(self._events))

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]


class StepPeer(Peer):
    """Peer that gets a whole step in one message, see `cog_triton.engines.step_items`."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._step = step_items.StepBuffer()
        self._compact_at = _MAX_WAITING

    def add(self, running: Running, event: TokenEvent) -> None:
        """See `Peer.add`."""
        running.sent = self._step.add(running.handle, running.sent, event, running.width)

    def _take(self) -> Any:
        step, self._step = self._step, step_items.StepBuffer()
        self._compact_at = _MAX_WAITING
        if not step.items:
            return None
        encoded = step.encoded()
        return "step", encoded.items.tobytes(), encoded.log_probs.tobytes(), encoded.errors

    def _compact(self) -> None:
        if len(self._step.items) > self._compact_at:
            self._step.merge()
            self._compact_at = 2 * len(self._step.items) + _MAX_WAITING
