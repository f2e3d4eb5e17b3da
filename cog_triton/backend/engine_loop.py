"""Event loop of an engine process: one `StepEngine` for its owner and any number of guests.

Guests connect to a Unix socket, say what they want to receive, and get `max_batch_size`. Each peer
has handles of its own; one that hangs up has its requests cancelled.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from cog_triton.backend.engine_peers import Peer, Running, StepPeer
from cog_triton.engines.base import StepEngine
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import STEPS, TOKENS
from cog_triton.errors import CogTritonError
from cog_triton.system import local_socket

_log = logging.getLogger(__name__)
_LISTEN_TIMEOUT_S = 10
_RETRY_S = 0.1
_STATS_PERIOD_S = 0.1


def run_engine(engine: StepEngine, owner: Connection, socket_name: str | None = None) -> None:
    """Serve `engine` until its owner closes it; raises EOFError or OSError when that hangs up.

    Guests connect to the socket `socket_name`; raises OSError if it stays taken.
    """
    loop = _EngineLoop(engine, owner, _listen(socket_name) if socket_name else None)
    try:
        loop.run()
    finally:
        loop.close()


def _listen(name: str) -> socket.socket:
    """Listen as soon as an engine process from before a restart is gone."""
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while True:
        try:
            return local_socket.listen(name)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


class _EngineLoop:
    def __init__(
        self, engine: StepEngine, owner: Connection, listener: socket.socket | None
    ) -> None:
        self._engine = engine
        self._owner = Peer(owner)
        self._listener = listener
        self._strangers: list[Connection] = []
        self._guests: list[Peer] = []  # those that get steps first
        self._running: dict[int, Running] = {}
        self._numbers = itertools.count(1)
        self._kv_cache: KVCacheStats | None = None  # as the owner knows it
        self._next_stats = 0.0
        self._closed = False

    def run(self) -> None:
        self._owner.send(self._engine.max_batch_size)
        engine, running = self._engine, self._running
        while True:
            held = engine.waits_for_readers and bool(self._behind())
            wait = None if held else engine.wait_s()
            while self._receive_all(wait):
                wait = 0.0
            if self._closed:
                return
            if not held:
                for number, event in engine.step():
                    if (of := running.get(number)) is not None:
                        self._add(number, of, event)
            self._flush()
            self._send_stats()

    def close(self) -> None:
        for peer in (self._owner, *self._guests):
            peer.close()
        for connection in self._strangers:
            connection.close()
        if self._listener is not None:
            self._listener.close()

    def _behind(self) -> list[Peer]:
        return [peer for peer in (self._owner, *self._guests) if peer.is_behind]

    def _receive_all(self, wait: float | None) -> bool:
        """Wait, then take one message of each peer that has one; returns whether to go on."""
        sources: list[Peer | Connection | socket.socket]
        sources = [self._owner, *self._guests, *self._strangers]
        if self._listener is not None:
            sources.append(self._listener)
        readable, _, _ = select.select(sources, self._behind(), [], wait)
        for source in readable:
            if isinstance(source, Peer):
                self._receive(source)
            elif isinstance(source, Connection):
                self._greet(source)
            elif (connection := local_socket.accept(source)) is not None:
                self._strangers.append(connection)
        return bool(readable) and not self._closed

    def _greet(self, connection: Connection) -> None:
        """Read a guest's hello, and make it a peer."""
        self._strangers.remove(connection)
        try:
            hello = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return
        if hello not in (STEPS, TOKENS):
            _log.warning("a guest of the engine says %.80r; it must be steps or tokens", hello)
            connection.close()
            return
        peer = StepPeer(connection) if hello == STEPS else Peer(connection)
        self._guests.append(peer)
        self._guests.sort(key=lambda guest: not isinstance(guest, StepPeer))
        try:
            peer.send(self._engine.max_batch_size)
        except OSError:
            self._leave(peer)

    def _receive(self, peer: Peer) -> None:
        try:
            message = peer.connection.recv()
        except (EOFError, OSError):
            if peer is self._owner:
                raise
            message = None
        if message is not None:
            self._take(peer, *message)
        elif peer is self._owner:
            self._closed = True
        elif peer in self._guests:
            self._leave(peer)

    def _take(self, peer: Peer, kind: str, handle: int, request: EngineRequest) -> None:
        if kind == "cancel":
            if (number := peer.numbers.get(handle)) is not None:
                self._engine.cancel(number)
            return
        number = next(self._numbers)
        running = Running(peer, handle, request.log_prob_width)
        self._running[number] = running
        peer.numbers[handle] = number
        try:
            self._engine.submit(number, request)
        except CogTritonError as error:
            self._add(number, running, TokenEvent([], [], error=error))

    def _add(self, number: int, running: Running, event: TokenEvent) -> None:
        running.peer.add(running, event)
        if event.finish is not None or event.error is not None:
            del self._running[number]
            del running.peer.numbers[running.handle]

    def _flush(self) -> None:
        for peer in tuple(self._guests):
            try:
                peer.flush()
            except OSError:
                self._leave(peer)
        self._owner.flush()

    def _send_stats(self) -> None:
        """Tell the owner of the KV cache, now and then, and when the last request has ended."""
        now = time.monotonic()
        if self._owner.is_behind or (self._running and now < self._next_stats):
            return
        self._next_stats = now + _STATS_PERIOD_S
        stats = self._engine.kv_cache()
        if stats is not None and stats != self._kv_cache:
            self._kv_cache = stats
            self._owner.send(stats)

    def _leave(self, peer: Peer) -> None:
        """Forget a guest, and cancel its requests."""
        self._guests.remove(peer)
        for number in peer.numbers.values():
            del self._running[number]
            self._engine.cancel(number)
        with suppress(OSError):
            peer.close()
