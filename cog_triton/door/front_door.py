"""The front door: a listener and a gate for each public port, until what is behind it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping

from cog_triton.door.access import Access, is_loopback
from cog_triton.door.backends import Backends
from cog_triton.door.client_connection import ClientConnection
from cog_triton.door.cog_gate import CogGate
from cog_triton.door.cog_state import CogState
from cog_triton.door.connections import Connections
from cog_triton.door.gate import Gate
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.limits import Limits
from cog_triton.door.listener import Listener
from cog_triton.door.openai_gate import MetricsGate, OpenAIGate
from cog_triton.door.triton_gate import TritonGate
from cog_triton.door.webhook_proxy import WebhookProxy
from cog_triton.door.webhooks import WebhookRules
from cog_triton.errors import CogTritonError
from cog_triton.serving.cog_liveness import CogWatch
from cog_triton.settings import Settings
from cog_triton.system.reaper import Reaped

_FLUSH_S = 1.0
_POLL_S = 0.02
# Not Triton's: it gives a connection to one of its threads when it accepts it.
_WARM = ("PORT", "OPENAI_PORT")
_LOG = logging.getLogger(__name__)


class FrontDoor:
    """Serves on listening sockets, by the names of their settings, what private ports answer."""

    def __init__(
        self,
        settings: Settings,
        private: Mapping[str, int],
        descriptors: int,
        *,
        watches: bool = False,
    ) -> None:
        """`descriptors` is the limit of open files of this process.

        With `watches`, a Cog that hangs after it was ready is killed: no one above looks after it.
        """
        self._settings = settings
        self._private = private
        self._limits = Limits.of(settings, descriptors)
        self._connections = Connections(self._limits.connections, self._limits.all_bodies_bytes)
        self._large_bodies = LargeBodies()
        self._webhooks = WebhookRules.of(settings)
        self._backends: Backends | None = None
        self._watches = watches
        self._stops = 0
        self._stopped = asyncio.Event()

    async def serve(
        self,
        sockets: Mapping[str, socket.socket],
        start_cog: Callable[[int], Reaped] | None,
    ) -> int:
        """Serve until Cog has ended, without one until SIGTERM; its exit code.

        `start_cog` gets the port of the proxy through which Cog may post webhooks. SIGTERM and
        SIGINT are passed on to Cog; a second one kills it.
        """
        loop = asyncio.get_running_loop()
        webhook_proxy = WebhookProxy(self._webhooks)
        cog = start_cog(await webhook_proxy.start()) if start_cog else None
        state = CogState(self._private.get("PORT", 0))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, cog)
        warm = {self._private[name] for name in _WARM if name in sockets}
        backends = self._backends = Backends(warm)
        listeners = [
            self._listener(listening, self._gate(name, listening, state), backends)
            for name, listening in sockets.items()
        ]
        tasks = [loop.create_task(state.watch())] if "PORT" in sockets else []
        if cog is not None and self._watches:
            tasks.append(loop.create_task(self._watch(cog, state)))
        try:
            if cog is None:
                await self._stopped.wait()
                code = 0
            else:
                code = await asyncio.to_thread(cog.wait)
            await self._flush()
        finally:
            for task in tasks:
                task.cancel()
            if cog is not None:
                cog.kill()
            webhook_proxy.close()
            for listener in listeners:
                listener.close()
            backends.close()
            self._large_bodies.close()
            self._connections.abort_all()
            await asyncio.sleep(0)
        return code

    def _listener(self, listening: socket.socket, gate: Gate, backends: Backends) -> Listener:
        def connection() -> ClientConnection:
            return ClientConnection(gate, self._limits, self._connections, backends)

        return Listener(listening, connection)

    def _gate(self, name: str, listening: socket.socket, state: CogState) -> Gate:
        settings, port = self._settings, self._private[name]
        access = Access(settings.api_key, is_loopback(listening.getsockname()[0]))
        common = (port, access, self._limits, self._large_bodies)
        public = settings.metrics_public
        match name:
            case "PORT":
                has_page = self._settings.openai_page and "OPENAI_PORT" in self._private
                page_port = self._settings.openai_port if has_page else None
                return CogGate(*common, state, self._webhooks, page_port)
            case "TRITON_HTTP_PORT":
                return TritonGate(*common)
            case "OPENAI_PORT":
                page = self._settings.openai_page
                return OpenAIGate(*common, metrics_public=public, page=page)
            case _:
                return MetricsGate(*common, metrics_public=public)

    def _on_signal(self, cog: Reaped | None) -> None:
        self._stops += 1
        self._stopped.set()
        if self._backends is not None:
            self._backends.close()
        if cog is not None and self._stops == 1:
            cog.terminate()
        elif cog is not None and self._stops == 2:
            asyncio.get_running_loop().run_in_executor(None, cog.kill)

    async def _watch(self, cog: Reaped, state: CogState) -> None:
        """Kill a Cog that is lost; its end is then that of the door, with an exit code."""
        while not state.serves:
            await asyncio.sleep(_POLL_S)
        watch = CogWatch(self._settings, "127.0.0.1", self._private["PORT"], os.getpid())
        while not self._stops:
            await asyncio.sleep(self._settings.cog_probe_period)
            try:
                line = await asyncio.to_thread(watch.check)
            except CogTritonError as error:
                _LOG.error("%s", error)
                await asyncio.to_thread(cog.kill)
                return
            if line:
                _LOG.warning("%s", line)

    async def _flush(self) -> None:
        """Let clients have what was answered before the end."""
        deadline = asyncio.get_running_loop().time() + _FLUSH_S
        while self._connections.busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_S)
