"""Event loop of an engine process: one `StepEngine` for any number of peers.

Peers connect to a Unix socket, say what they want to receive, and get `max_batch_size`. Each has
handles of its own; one that hangs up has its requests cancelled.
"""

from __future__ import annotations

import itertools
import logging
import math
import select
import socket
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from cog_triton.backend.engine_peers import Peer, Running, StepPeer
from cog_triton.engines.base import StepEngine
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import OWNER, STEPS, TOKENS
from cog_triton.errors import CogTritonError
from cog_triton.ipc.connection import Connection as Control
from cog_triton.keeper.keeper_messages import Stop
from cog_triton.system import local_socket
from cog_triton.system.shared_time import SharedTime

_log = logging.getLogger(__name__)
_STATS_PERIOD_S = 0.1


def run_engine(
    engine: StepEngine, control: Control, listener: socket.socket, progress: SharedTime
) -> None:
    """Serve `engine` to who connects to `listener`, until `control` brings `Stop`.

    `progress` is set to when the next step is due. Raises EOFError or OSError when the process at
    the other end of `control` is gone.
    """
    loop = _EngineLoop(engine, control, listener, progress)
    try:
        loop.run()
    finally:
        loop.close()


class _EngineLoop:
    def __init__(
        self,
        engine: StepEngine,
        control: Control,
        listener: socket.socket,
        progress: SharedTime,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._progressed = True
        self._control = control
        self._listener = listener
        self._strangers: list[Connection] = []
        self._peers: list[Peer] = []  # those that get steps first
        self._running: dict[int, Running] = {}
        self._numbers = itertools.count(1)
        self._next_stats = 0.0
        self._closed = False

    def run(self) -> None:
        engine, running = self._engine, self._running
        while True:
            held = engine.waits_for_readers and bool(self._behind())
            wait = None if held else engine.wait_s()
            self._tell_due(wait, held=held)
            while self._receive_all(wait):
                wait = 0.0
            if self._closed:
                return
            if not held:
                self._tell_due(0.0, held=False)
                for number, event in engine.step():
                    self._progressed = True
                    if (of := running.get(number)) is not None:
                        self._add(number, of, event)
            self._flush()
            self._send_stats()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        for connection in self._strangers:
            connection.close()
        self._control.close()
        self._listener.close()

    def _tell_due(self, wait: float | None, *, held: bool) -> None:
        """Tell when the step after `wait` is due: with requests that run there must be one.

        A step that is overdue stays so until one brings an event, whatever messages come.
        """
        if held or not self._running:
            self._progress.set(math.inf)
            self._progressed = True
        elif wait or self._progressed:
            self._progress.set(time.monotonic() + (wait or 0.0))
            self._progressed = False

    def _behind(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.is_behind]

    def _receive_all(self, wait: float | None) -> bool:
        """Wait, then take one message of each peer that has one; returns whether to go on."""
        sources: list[Peer | Connection | Control | socket.socket]
        sources = [*self._peers, *self._strangers, self._control, self._listener]
        readable, _, _ = select.select(sources, self._behind(), [], wait)
        for source in readable:
            if isinstance(source, Peer):
                self._receive(source)
            elif source is self._control:
                self._closed = isinstance(self._control.receive(), Stop)
            elif isinstance(source, Connection):
                self._greet(source)
            elif (connection := local_socket.accept(self._listener)) is not None:
                self._strangers.append(connection)
        return bool(readable) and not self._closed

    def _greet(self, connection: Connection) -> None:
        """Read the hello of who has connected, and make it a peer."""
        self._strangers.remove(connection)
        try:
            hello = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return
        if hello not in (STEPS, TOKENS, OWNER):
            _log.warning("a peer says %.80r; it must be one of steps, tokens, owner", hello)
            connection.close()
            return
        peer = StepPeer(connection) if hello == STEPS else Peer(connection)
        peer.wants_stats = hello == OWNER
        self._peers.append(peer)
        self._peers.sort(key=lambda peer: not isinstance(peer, StepPeer))
        try:
            peer.send(self._engine.max_batch_size)
        except OSError:
            self._leave(peer)

    def _receive(self, peer: Peer) -> None:
        try:
            message = peer.connection.recv()
        except (EOFError, OSError):
            message = None
        if message is not None:
            self._take(peer, *message)
        elif peer in self._peers:
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
        for peer in tuple(self._peers):
            try:
                peer.flush()
            except OSError:
                self._leave(peer)

    def _send_stats(self) -> None:
        """Tell the owner of the KV cache, now and then, and when the last request has ended."""
        now = time.monotonic()
        owners = [peer for peer in self._peers if peer.wants_stats and not peer.is_behind]
        if not owners or (self._running and now < self._next_stats):
            return
        self._next_stats = now + _STATS_PERIOD_S
        stats = self._engine.kv_cache()
        for peer in owners:
            if stats is not None and stats != peer.told_stats:
                peer.told_stats = stats
                try:
                    peer.send(stats)
                except OSError:
                    self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        """Forget a peer, and cancel its requests."""
        self._peers.remove(peer)
        for number in peer.numbers.values():
            del self._running[number]
            self._engine.cancel(number)
        with suppress(OSError):
            peer.close()
