"""Engine server: one engine for any number of clients, in every engine process.

Clients connect to a Unix socket, say what they are, and have handles of their own; one that hangs
up has its requests cancelled. The engine knows requests by numbers. When the engine computes is
left to `engine_loop`. Sending never blocks the engine: what a peer has not read waits, and is
merged when it grows.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

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
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import StepBuffer
from cog_triton.errors import CogTritonError, TritonMalformedEvent
from cog_triton.ipc.framing import FrameDecoder, FrameError, frame
from cog_triton.system import local_socket

_log = logging.getLogger(__name__)
_MAX_WAITING = 4096
_STATS_PERIOD_S = 0.1


@dataclass(slots=True)
class Running:
    """A request of a peer: `handle` is the peer's number for it, `sent` counts its tokens.

    `width` is the number of log probabilities a token.
    """

    peer: Peer
    handle: int
    width: int = 0
    sent: int = 0


class Peer(asyncio.Protocol):
    """Connection to a client: `numbers` are the engine's numbers of requests by its handles.

    `role` is None until it has said it.
    """

    def __init__(self, server: EngineServer) -> None:
        self.role: Role | None = None
        self.numbers: dict[int, int] = {}
        self.is_behind = False
        """Whether the peer has not read all that was sent."""
        self._server = server
        self._transport: asyncio.Transport
        self._told: dict[type, Any] = {Others: Others(run=False), StepLoad: StepLoad(0)}
        self._decoder = FrameDecoder()
        self.events: list[bytes] = []
        self.step = StepBuffer()
        """What `flush` is to send: of other answers than tokens, and of tokens."""
        self._merge_at = _MAX_WAITING

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hang up on another user."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # whatever is left there makes it `is_behind`
        if local_socket.is_same_user(transport.get_extra_info("socket")):
            self._server.peers.append(self)
        else:
            self.hang_up()

    def data_received(self, data: bytes) -> None:
        """Have the server take each message."""
        try:
            for payload in self._decoder.feed(data):
                self._server.take(self, engine_messages.decode(payload))
        except FrameError as error:
            _log.warning("a peer is hung up on: %s", error)
            self.hang_up()
        self._server.on_news()

    def eof_received(self) -> None:
        """Hang up, too: nobody reads what is left to send."""
        self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Have the server forget it."""
        self._server.leave(self)
        self._server.on_news()

    def pause_writing(self) -> None:
        """The peer has not read all: the next steps are merged."""
        self.is_behind = True

    def resume_writing(self) -> None:
        """The peer has read all."""
        self.is_behind = False
        self._server.flush()
        self._server.on_news()

    def flush(self) -> None:
        """Send what is queued, unless the peer `is_behind`."""
        if self.is_behind:
            if len(self.step.items) > self._merge_at:
                self.step.merge()
                self._merge_at = 2 * len(self.step.items) + _MAX_WAITING
        elif self.events or self.step.items:
            events, self.events = self.events, []
            if self.step.items:
                step, self.step = self.step, StepBuffer()
                events.append(frame(engine_messages.encode(step.encoded())))
            self._merge_at = _MAX_WAITING
            self._transport.write(b"".join(events))

    def send(self, message: Any) -> None:
        """Send a message now, behind what is still unsent."""
        self._transport.write(frame(engine_messages.encode(message)))

    def report(self, news: Any) -> None:
        """Send a message that says what is so, unless the last one of its class was the same."""
        if self._told.get(type(news)) != news:
            self._told[type(news)] = news
            self.send(news)

    def hang_up(self) -> None:
        """Close the connection at once; `connection_lost` follows."""
        self._transport.abort()


class EngineServer:
    """Serves `engine` in the loop that runs; not thread-safe."""

    def __init__(self, engine: ServedEngine, on_news: Callable[[], None] = lambda: None) -> None:
        """`on_news` is called when a peer has sent something, or has read all that was sent."""
        self.on_news = on_news
        self.peers: list[Peer] = []
        self._engine = engine
        self._listener: asyncio.Server | None = None
        self._generation = 0
        self._running: dict[int, Running] = {}
        self._numbers = itertools.count(1)
        self._telling: asyncio.TimerHandle | None = None

    async def listen(self, address: str, generation: int) -> None:
        """Listen, as the engine of this generation; raises OSError if another process does.

        Not before the engine is loaded: what it forks would listen, too.
        """
        self._generation = generation
        loop = asyncio.get_running_loop()
        listener = local_socket.listen(address)
        self._listener = await loop.create_unix_server(lambda: Peer(self), sock=listener)

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    @property
    def is_behind(self) -> bool:
        """Whether a peer has not read all that was sent."""
        return any(peer.is_behind for peer in self.peers)

    def runs(self, number: int) -> bool:
        """Whether a request has not ended."""
        return number in self._running

    def emit(self, number: int, event: Any) -> None:
        """Queue an event of a request for `flush`; none is sent after its last one."""
        running = self._running.get(number)
        if running is None:
            return
        peer, handle = running.peer, running.handle
        if isinstance(event, TokenEvent):
            running.sent = peer.step.add(handle, running.sent, event, running.width)
        else:
            peer.events.append(frame(engine_messages.encode(Event(handle, event))))
        if event.finish is not None or event.error is not None:
            del self._running[number]
            peer.numbers.pop(handle, None)

    def flush(self) -> None:
        """Send what is queued: one message to each peer, to those first that get steps.

        Owners hear of the load and the KV cache within 0.1 s.
        """
        for peer in self.peers:
            peer.flush()
        self._tell_of_others()
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(_STATS_PERIOD_S, self._tell_stats)

    def fail_all(self, error: CogTritonError) -> None:
        """End every request with an error."""
        for number in tuple(self._running):
            self.emit(number, TokenEvent([], [], error=error))
        self.flush()

    def close(self) -> None:
        """Hang up on all."""
        peers, self.peers = self.peers, []
        for peer in peers:
            peer.hang_up()
        if self._listener is not None:
            self._listener.close()
        if self._telling is not None:
            self._telling.cancel()

    def take(self, peer: Peer, message: Any) -> None:
        """Do as a peer says; raises FrameError if that breaks the protocol."""
        if peer.role is None:
            self._greet(peer, message)
        elif isinstance(message, Cancel):
            if (number := peer.numbers.get(message.handle)) is not None:
                self._engine.cancel(number)
        elif isinstance(message, Submit) and message.handle not in peer.numbers:
            self._submit(peer, message)
        else:
            raise FrameError(f"it sends {type(message).__name__}: neither a new request nor Cancel")

    def leave(self, peer: Peer) -> None:
        """Forget a peer that is gone, and cancel its requests."""
        if peer in self.peers:
            self.peers.remove(peer)
            for number in peer.numbers.values():
                del self._running[number]
                self._engine.cancel(number)
            self.flush()

    def _greet(self, peer: Peer, hello: Any) -> None:
        if not isinstance(hello, Hello) or hello.role not in ROLES:
            raise FrameError(f"it says {hello!r:.80}; it must be one of {', '.join(ROLES)}")
        peer.role = hello.role
        self.peers.sort(key=lambda peer: peer.role != "steps")
        peer.send(Welcome(self._engine.max_batch_size, self._generation))
        self.flush()

    def _submit(self, peer: Peer, message: Submit) -> None:
        number = next(self._numbers)
        running = self._running[number] = Running(peer, message.handle)
        peer.numbers[message.handle] = number
        try:
            request = message.request()
            self._tell_of_others()
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
        self.emit(number, TokenEvent([], [], error=error))
        self.flush()

    def _tell_of_others(self) -> None:
        """Say whether others have requests; that they have none, only to who reads."""
        for peer in self.peers:
            others = len(self._running) > len(peer.numbers)
            if peer.role == "steps" and (others or not peer.is_behind):
                peer.report(Others(others))

    def _load(self, role: Role) -> int:
        return sum(len(peer.numbers) for peer in self.peers if peer.role == role)

    def _tell_stats(self) -> None:
        self._telling = None
        load = StepLoad(self._load("steps"), self._load("tokens"))
        owners = [peer for peer in self.peers if peer.role == "owner" and not peer.is_behind]
        stats = self._engine.kv_cache() if owners else None
        for owner in owners:
            owner.report(load)
            if stats is not None:
                owner.report(stats)
