"""Peers of an engine process: clients that submit requests and receive steps.

Sending never blocks the engine: what a peer has not read waits, and is merged when it grows.
"""

from __future__ import annotations

import socket
from typing import Any

from cog_triton.engines import engine_messages
from cog_triton.engines.engine_messages import Event, Role
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import TokenEvent
from cog_triton.engines.step_items import StepBuffer
from cog_triton.ipc.framing import FrameDecoder, frame

_CHUNK = 1 << 18
_MAX_WAITING = 4096


class Running:
    """A request of a peer: `handle` is the peer's number for it, `sent` counts its tokens."""

    __slots__ = ("handle", "peer", "sent", "width")

    def __init__(self, peer: Peer, handle: int, width: int) -> None:
        """`width` is the number of log probabilities a token."""
        self.peer = peer
        self.handle = handle
        self.width = width
        self.sent = 0


class Peer:
    """Connection to a client: `numbers` are the engine's numbers of requests by its handles.

    `role` is None until it has said it, `told_stats` what an owner knows of the KV cache.
    """

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self.closed = False
        self.role: Role | None = None
        self.numbers: dict[int, int] = {}
        self.told_stats: KVCacheStats | None = None
        self._socket = own
        self._decoder = FrameDecoder()
        self._unsent = memoryview(b"")
        self._events: list[bytes] = []
        self._step = StepBuffer()
        self._merge_at = _MAX_WAITING

    @property
    def is_behind(self) -> bool:
        """Whether the peer has not read all that was sent."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """Descriptor, for select."""
        return self._socket.fileno()

    def receive(self) -> list[Any]:
        """Messages that have arrived; raises EOFError or OSError at a hang-up."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return [engine_messages.decode(payload) for payload in self._decoder.feed(data)]

    def add(self, running: Running, event: Any) -> None:
        """Queue an event for `flush`."""
        if isinstance(event, TokenEvent):
            running.sent = self._step.add(running.handle, running.sent, event, running.width)
        else:
            self._events.append(frame(engine_messages.encode(Event(running.handle, event))))

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it; raises OSError at a hang-up."""
        if self._unsent:
            self._write()
            if self._unsent:
                self._merge()
                return
        if self._events or self._step.items:
            events, self._events = self._events, []
            if self._step.items:
                step, self._step = self._step, StepBuffer()
                events.append(frame(engine_messages.encode(step.encoded())))
            self._merge_at = _MAX_WAITING
            self._unsent = memoryview(b"".join(events))
            self._write()

    def send(self, message: Any) -> None:
        """Send a message now, behind what is still unsent; raises OSError at a hang-up."""
        content = frame(engine_messages.encode(message))
        self._unsent = memoryview(bytes(self._unsent) + content)
        self._write()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self._socket.close()

    def _merge(self) -> None:
        if len(self._step.items) > self._merge_at:
            self._step.merge()
            self._merge_at = 2 * len(self._step.items) + _MAX_WAITING

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]
