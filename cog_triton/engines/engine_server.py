"""Engine server: one engine for any number of clients, in every engine process.

Clients connect to a Unix socket, say what they are, and have handles of their own; one that hangs
up has its requests cancelled. The engine knows requests by numbers. Who turns the loop, and when
the engine computes, is left to `step_loop` and `async_loop`. Sending never blocks the engine: what
a peer has not read waits, and is merged when it grows.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from cog_triton.engines import engine_messages
from cog_triton.engines.base import ServedEngine
from cog_triton.engines.engine_messages import (
    ROLES,
    Cancel,
    Event,
    Hello,
    Others,
    Role,
    StepLoad,
    Submit,
    Welcome,
)
from cog_triton.engines.engine_orders import Serve
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import StepBuffer
from cog_triton.errors import CogTritonError, TritonMalformedEvent
from cog_triton.ipc.connection import Connection
from cog_triton.ipc.framing import FrameDecoder, FrameError, frame
from cog_triton.system import local_socket

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

    `role` is None until it has said it. `told_stats` and `told_load` are what an owner knows,
    `told_others` is what one that gets steps knows of others.
    """

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self.closed = False
        self.role: Role | None = None
        self.numbers: dict[int, int] = {}
        self.told_stats: KVCacheStats | None = None
        self.told_load = StepLoad(0)
        self.told_others = Others(run=False)
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


_log = logging.getLogger(__name__)
_STATS_PERIOD_S = 0.1


class Loop(Protocol):
    """The part of asyncio's loop by which a server learns that a descriptor is ready."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> Any: ...
    def add_writer(self, fd: int, callback: Callable[[], None], /) -> Any: ...
    def remove_reader(self, fd: int, /) -> Any: ...
    def remove_writer(self, fd: int, /) -> Any: ...


class EngineServer:
    """Serves `engine` at the address that `control` brings, while `control`'s other end is there.

    Not thread-safe: all of it runs in the loop's thread.
    """

    def __init__(
        self,
        engine: ServedEngine,
        loop: Loop,
        control: Connection,
        on_order: Callable[[Any], None],
    ) -> None:
        """`on_order` gets what else `control` brings, and the error of its end."""
        self._engine = engine
        self._loop = loop
        self._control = control
        self._listener: socket.socket | None = None
        self._generation = 0
        self._on_order = on_order
        self._strangers: set[Peer] = set()
        self._peers: list[Peer] = []  # those that get steps first
        self._behind: set[Peer] = set()
        self._running: dict[int, Running] = {}
        self._numbers = itertools.count(1)
        self._next_stats = 0.0
        loop.add_reader(control.fileno(), self._receive_order)

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    @property
    def is_behind(self) -> bool:
        """Whether a peer has not read all that was sent."""
        return bool(self._behind)

    def runs(self, number: int) -> bool:
        """Whether a request has not ended."""
        return number in self._running

    def emit(self, number: int, event: Any) -> None:
        """Queue an event of a request for `flush`; none is sent after its last one."""
        running = self._running.get(number)
        if running is None:
            return
        running.peer.add(running, event)
        if event.finish is not None or event.error is not None:
            del self._running[number]
            running.peer.numbers.pop(running.handle, None)

    def flush(self) -> None:
        """Send what is queued: one message to each peer, to those first that get steps."""
        for peer in tuple(self._peers):
            self._flush(peer)
        self._tell_of_others()

    def fail_all(self, error: CogTritonError) -> None:
        """End every request with an error."""
        for number in tuple(self._running):
            self.emit(number, TokenEvent([], [], error=error))
        self.flush()

    def tell_stats(self) -> None:
        """Report to owners: the load at once, the KV cache now and then, and at the last end."""
        owners = [peer for peer in self._peers if peer.role == "owner" and not peer.is_behind]
        load = StepLoad(sum(len(peer.numbers) for peer in self._peers if peer.role == "steps"))
        for peer in owners:
            if load != peer.told_load:
                peer.told_load = load
                self._send(peer, load)
        now = time.monotonic()
        if not owners or (self._running and now < self._next_stats):
            return
        self._next_stats = now + _STATS_PERIOD_S
        stats = self._engine.kv_cache()
        for peer in owners:
            if stats is not None and stats != peer.told_stats:
                peer.told_stats = stats
                self._send(peer, stats)

    def close(self) -> None:
        """Hang up on all."""
        for peer in (*self._peers, *self._strangers):
            self._hang_up(peer)
        for source in (self._listener, self._control):
            if source is not None:
                self._loop.remove_reader(source.fileno())
                source.close()

    def _listen(self, order: Serve) -> None:
        # Not before it is loaded: what the engine forks would listen, too.
        self._generation = order.generation
        try:
            self._listener = local_socket.listen(order.address)
        except OSError as error:
            self._on_order(error)
        else:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        accepted = local_socket.accept(self._listener)
        if accepted is not None:
            peer = Peer(accepted)
            self._strangers.add(peer)
            self._loop.add_reader(peer.fileno(), lambda: self._receive(peer))

    def _receive_order(self) -> None:
        timeout = None
        while True:  # one read may bring several
            try:
                order = self._control.receive(timeout)
            except TimeoutError:
                return
            except (EOFError, OSError) as error:
                # Its end can be read again and again, while an order is carried out.
                self._loop.remove_reader(self._control.fileno())
                self._on_order(error)
                return
            if isinstance(order, Serve):
                self._listen(order)
            else:
                self._on_order(order)
            timeout = 0.0

    def _receive(self, peer: Peer) -> None:
        try:
            for message in peer.receive():
                if peer.closed:
                    return
                if peer.role is None:
                    self._greet(peer, message)
                else:
                    self._take(peer, message)
        except FrameError as error:
            _log.warning("a peer is hung up on: %s", error)
            self._leave(peer)
        except (EOFError, OSError):
            self._leave(peer)

    def _greet(self, peer: Peer, hello: Any) -> None:
        """Make a peer of who has connected, by its first message."""
        if not isinstance(hello, Hello) or hello.role not in ROLES:
            raise FrameError(f"it says {hello!r:.80}; it must be one of {', '.join(ROLES)}")
        peer.role = hello.role
        self._strangers.discard(peer)
        self._peers.append(peer)
        self._peers.sort(key=lambda peer: peer.role != "steps")
        self._send(peer, Welcome(self._engine.max_batch_size, self._generation))

    def _take(self, peer: Peer, message: Any) -> None:
        if isinstance(message, Cancel):
            if (number := peer.numbers.get(message.handle)) is not None:
                self._engine.cancel(number)
            return
        if not isinstance(message, Submit) or message.handle in peer.numbers:
            raise FrameError(f"it sends {type(message).__name__}: neither a new request nor Cancel")
        number = next(self._numbers)
        running = self._running[number] = Running(peer, message.handle, 0)
        peer.numbers[message.handle] = number
        try:
            request = message.request()
            if getattr(request, "computes", True):
                self._tell_of_others()
            if peer.closed:  # it was one of those
                return
            if isinstance(request, EngineRequest):
                running.width = request.log_prob_width
                if peer.role == "steps" and not request.streaming:
                    request = replace(request, streaming=True)
            self._engine.submit(number, request)
        except CogTritonError as error:
            self._refuse(number, error)
        except FrameError as error:
            self._refuse(number, TritonMalformedEvent(f"a request: {error}"))

    def _refuse(self, number: int, error: CogTritonError) -> None:
        peer = self._running[number].peer
        self.emit(number, TokenEvent([], [], error=error))
        self._flush(peer)
        self._tell_of_others()

    def _send(self, peer: Peer, message: Any) -> None:
        try:
            peer.send(message)
        except OSError:
            self._leave(peer)
        else:
            self._watch(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            peer.flush()
        except OSError:
            self._leave(peer)
        else:
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        """Have a peer that is behind flushed as soon as it reads."""
        if peer.is_behind and peer not in self._behind:
            self._behind.add(peer)
            self._loop.add_writer(peer.fileno(), lambda: self._flush(peer))
        elif peer in self._behind and not peer.is_behind:
            self._behind.discard(peer)
            self._loop.remove_writer(peer.fileno())

    def _leave(self, peer: Peer) -> None:
        """Forget a peer, and cancel its requests."""
        if peer.closed:
            return
        self._hang_up(peer)
        for number in peer.numbers.values():
            del self._running[number]
            self._engine.cancel(number)
        self._tell_of_others()

    def _tell_of_others(self) -> None:
        """Say whether others have requests; that they have none, only to who reads."""
        for peer in tuple(self._peers):
            others = Others(len(self._running) > len(peer.numbers))
            if peer.role != "steps" or others == peer.told_others:
                continue
            if others.run or not peer.is_behind:
                peer.told_others = others
                self._send(peer, others)

    def _hang_up(self, peer: Peer) -> None:
        self._strangers.discard(peer)
        with suppress(ValueError):
            self._peers.remove(peer)
        self._loop.remove_reader(peer.fileno())
        if peer in self._behind:
            self._behind.discard(peer)
            self._loop.remove_writer(peer.fileno())
        peer.close()
