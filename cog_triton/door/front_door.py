"""The front door: a listener and a gate for each public port, until what is behind it ends.

It stops gracefully, in one way for SIGTERM, SIGINT and POST /shutdown: the first request to stop
drains every API. What arrives from then on gets 503 (E2105), connections that ask for nothing are
closed, and what runs may end within DRAIN_TIMEOUT, whatever happens to the engine meanwhile. Then
the chain behind the door is stopped. A second signal stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from cog_triton.door.access import Access, GuessLimit, Refusals, is_loopback
from cog_triton.door.client_connection import ClientConnection, Connections, Listener
from cog_triton.door.cog_gate import CogGate
from cog_triton.door.file_reader import keep_current
from cog_triton.door.gate import Gate, MetricsGate, OpenAIGate
from cog_triton.door.keyring import Keyring
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.relay import ReadCoalescing
from cog_triton.door.request_parser import Limits
from cog_triton.door.tls import Certificate
from cog_triton.door.triton_gate import TritonGate
from cog_triton.door.upstream import Route, Upstream
from cog_triton.door.webhook_relay import WebhookRelay, WebhookRules
from cog_triton.settings import Settings

_FLUSH_S = 1.0
_WEBHOOKS_S = 3.0
_POLL_S = 0.02
_FIRST = asyncio.FIRST_COMPLETED
_LOG = logging.getLogger(__name__)


class GracefulStop:
    """Stop of `upstream`, once it is asked for; `seconds` is DRAIN_TIMEOUT."""

    def __init__(self, upstream: Upstream, connections: Connections, seconds: float) -> None:
        self._upstream = upstream
        self._connections = connections
        self._seconds = seconds
        self._asked = asyncio.Event()
        self._deadline = 0.0
        self._signalled = self._hurried = False
        upstream.ask_to_stop = self._asked.set

    def on_signal(self) -> None:
        """Stop; at the second signal, at once."""
        if self._signalled and not self._hurried:
            self._hurried = True
            if (chain := self._upstream.chain) is not None:
                asyncio.get_running_loop().run_in_executor(None, chain.reaper.kill)
        self._signalled = True
        self._asked.set()

    async def run(self) -> None:
        """Wait until it is asked for, then drain and stop everything behind the door."""
        await self._asked.wait()
        self._deadline = time.monotonic() + self._seconds
        _LOG.info("stopping: what runs may end within %g s (DRAIN_TIMEOUT)", self._seconds)
        self._upstream.stopping = True
        self._connections.refuse_reuse()
        more = self.patience(0.0)
        found = self._connections
        while (found.answering or found.may_ask) and self._lasts and more():
            await asyncio.sleep(_POLL_S)
        await self._upstream.drain(max(0.0, self._deadline - time.monotonic()))

    def patience(self, least: float) -> Callable[[], bool]:
        """Tells whether to wait on: for the rest of DRAIN_TIMEOUT, or for `least` seconds from now.

        Not after a second signal.
        """
        end = max(self._deadline, time.monotonic() + least)
        return lambda: not self._hurried and time.monotonic() < end

    @property
    def _lasts(self) -> bool:
        """Whether an answer may still come."""
        return not self._hurried and self._upstream.exit_code() is None


class FrontDoor:
    """Serves on listening sockets, by the names of their settings, what an upstream answers."""

    def __init__(self, settings: Settings, descriptors: int, *, watches: bool = False) -> None:
        """`descriptors` is the limit of open files of this process; raises E1005 for wrong keys.

        With `watches`, a Cog that hangs after it was ready is killed: no one above looks after it.
        """
        self._settings = settings
        self._limits = Limits.of(settings, descriptors)
        self._connections = Connections(self._limits.connections, self._limits.all_bodies_bytes)
        self._large_bodies = LargeBodies()
        self._webhooks = WebhookRelay(WebhookRules.of(settings))
        self._watches = watches
        self._guesses = GuessLimit()
        self._refusals = Refusals()
        keys = settings.cog_triton_keys
        self._keyring = None if keys is None else Keyring(keys, settings.api_key)
        self._certificate = None
        if settings.tls_cert_file is not None:
            chain = settings.tls_cert_file
            self._certificate = Certificate(chain, settings.tls_key_file or chain)

    async def serve(
        self,
        sockets: Mapping[str, socket.socket],
        start: Callable[[], Upstream],
    ) -> int:
        """Serve until the chain that `start` starts has ended; its exit code, 0 after a stop.

        An upstream without a chain is served until SIGTERM. SIGTERM and SIGINT drain what is
        behind; a second one kills it.
        """
        loop = asyncio.get_running_loop()
        coalescing = ReadCoalescing(loop)
        if "PORT" in sockets:
            self._webhooks.start()
        upstream = start()
        stop = GracefulStop(upstream, self._connections, self._settings.drain_timeout)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.on_signal)
        listeners = [
            self._listener(listening, self._gate(name, listening, upstream), coalescing)
            for name, listening in sockets.items()
        ]
        upstream.follow()
        if self._watches:
            upstream.watch(self._settings)
        stopping = loop.create_task(stop.run())
        readers = [each for each in (self._keyring, self._certificate) if each is not None]
        watching = loop.create_task(keep_current(readers))
        try:
            code = await self._until_ended(upstream, stopping)
            await self._flush(stop.patience(_FLUSH_S))
            await self._webhooks.drained(stop.patience(_WEBHOOKS_S))
        finally:
            stopping.cancel()
            watching.cancel()
            upstream.stop_watching()
            upstream.close()
            await self._webhooks.close()
            for listener in listeners:
                listener.close()
            self._large_bodies.close()
            self._connections.abort_all()
            await asyncio.sleep(0)
        return code

    async def _until_ended(self, upstream: Upstream, stopping: asyncio.Task[None]) -> int:
        """Exit code of the upstream, once that has ended; 0 once it was stopped."""
        if upstream.chain is not None:
            ended = asyncio.ensure_future(upstream.ended())
            await asyncio.wait({ended, stopping}, return_when=_FIRST)
            if ended.done() and not upstream.stopping:
                return ended.result() or 1  # nobody asked it to end
        await stopping
        return 0

    def _listener(
        self, listening: socket.socket, gate: Gate, coalescing: ReadCoalescing
    ) -> Listener:
        def connection() -> ClientConnection:
            return ClientConnection(gate, self._limits, self._connections, coalescing)

        return Listener(listening, connection, self._certificate)

    def _gate(self, name: str, listening: socket.socket, upstream: Upstream) -> Gate:
        settings = self._settings
        loopback = is_loopback(listening.getsockname()[0])
        access = Access(settings.api_key, loopback, self._keyring, self._guesses)
        access = replace(access, refusals=self._refusals)
        common = (Route(upstream, name), access, self._limits, self._large_bodies)
        public = settings.metrics_public
        match name:
            case "PORT":
                has_page = settings.openai_page and "OPENAI_PORT" in upstream.ports
                page_port = settings.openai_port if has_page else None
                return CogGate(*common, self._webhooks, page_port, settings.scheme)
            case "TRITON_HTTP_PORT":
                return TritonGate(*common)
            case "OPENAI_PORT":
                page = settings.openai_page
                return OpenAIGate(*common, metrics_public=public, page=page)
            case _:
                return MetricsGate(*common, metrics_public=public)

    async def _flush(self, more: Callable[[], bool]) -> None:
        """Let clients have what was answered before the end, and how the rest has ended."""
        loop = asyncio.get_running_loop()
        told = loop.time() + _FLUSH_S
        while (self._connections.answering and loop.time() < told) or (
            self._connections.has_unread and more()
        ):
            await asyncio.sleep(_POLL_S)
