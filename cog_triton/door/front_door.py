"""The front door: a listener and a gate for each public port, until what is behind it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Mapping

from cog_triton.door.access import Access, is_loopback
from cog_triton.door.chain_launcher import ChainLauncher
from cog_triton.door.client_connection import ClientConnection
from cog_triton.door.cog_gate import CogGate
from cog_triton.door.commands import Commands
from cog_triton.door.connections import Connections
from cog_triton.door.control_socket import ControlSocket
from cog_triton.door.gate import Gate
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.limits import Limits
from cog_triton.door.listener import Listener
from cog_triton.door.moderation import ReadModeration
from cog_triton.door.openai_gate import MetricsGate, OpenAIGate
from cog_triton.door.rolling import Rolling
from cog_triton.door.swapping import Swapping, first_variant
from cog_triton.door.triton_gate import TritonGate
from cog_triton.door.upstream import Upstream
from cog_triton.door.upstream_table import Route, Upstreams
from cog_triton.door.webhook_proxy import WebhookProxy
from cog_triton.door.webhooks import WebhookRules
from cog_triton.settings import Settings

_FLUSH_S = 1.0
_POLL_S = 0.02
_DRAIN_POLL_S = 0.2
_SWITCH_POLL_S = 0.2


class FrontDoor:
    """Serves on listening sockets, by the names of their settings, what an upstream answers."""

    def __init__(self, settings: Settings, descriptors: int, *, watches: bool = False) -> None:
        """`descriptors` is the limit of open files of this process.

        With `watches`, a Cog that hangs after it was ready is killed: no one above looks after it.
        """
        self._settings = settings
        self._limits = Limits.of(settings, descriptors)
        self._connections = Connections(self._limits.connections, self._limits.all_bodies_bytes)
        self._large_bodies = LargeBodies()
        self._webhooks = WebhookRules.of(settings)
        self._watches = watches
        self._stops = 0
        self._stopped = asyncio.Event()

    async def serve(
        self,
        sockets: Mapping[str, socket.socket],
        behind: ChainLauncher | Mapping[str, int],
    ) -> int:
        """Serve until the chain that `behind` starts has ended; its exit code.

        Before a Triton that is there already, on these ports, until SIGTERM. SIGTERM and SIGINT
        are passed on to Cog; a second one kills it.
        """
        loop = asyncio.get_running_loop()
        moderation = ReadModeration(loop)
        webhook_proxy = WebhookProxy(self._webhooks)
        if isinstance(behind, ChainLauncher):
            behind.webhook_proxy = await webhook_proxy.start()
            first = behind.start(first_variant(self._settings))
        else:
            first = Upstream("triton", behind)
        upstreams = Upstreams(first)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, upstreams)
        listeners = [
            self._listener(listening, self._gate(name, listening, upstreams), moderation)
            for name, listening in sockets.items()
        ]
        first.follow()
        if self._watches:
            first.watch(self._settings)
        control = draining = swapping = None
        if isinstance(behind, ChainLauncher) and self._settings.cog_triton_swap:
            swapping = upstreams.swapping = Swapping(self._settings, upstreams, behind)
            swapping.start()
        if isinstance(behind, ChainLauncher) and "TRITON_HTTP_PORT" in sockets:
            rolling = Rolling(self._settings, upstreams, behind, watches=self._watches)
            control = ControlSocket(
                self._settings.port, Commands(self._settings, rolling, upstreams)
            )
            draining = loop.create_task(self._drain_when_told(upstreams, rolling))
        try:
            if first.chain is None:
                await self._stopped.wait()
                code = 0
            else:
                code = await self._until_ended(upstreams)
            await self._flush()
        finally:
            if draining is not None:
                draining.cancel()
            if swapping is not None:
                await swapping.close()
            if control is not None:
                await control.close()
            for upstream in upstreams:
                upstream.stop_watching()
                upstream.close()
            webhook_proxy.close()
            for listener in listeners:
                listener.close()
            self._large_bodies.close()
            self._connections.abort_all()
            await asyncio.sleep(0)
        return code

    async def _until_ended(self, upstreams: Upstreams) -> int:
        """Exit code of the upstream that serves, once that has ended."""
        ends: dict[Upstream, asyncio.Task[int]] = {}
        while True:
            serving = upstreams.serving
            if serving not in ends:
                ends[serving] = asyncio.ensure_future(serving.ended())
            await asyncio.wait([ends[serving]], timeout=_SWITCH_POLL_S)
            if ends[serving].done() and upstreams.serving is serving:
                return ends[serving].result()

    async def _drain_when_told(self, upstreams: Upstreams, rolling: Rolling) -> None:
        """Pass a drain that `cog-triton serve` asks for on to all chains; its file goes after."""
        file = self._settings.cog_triton_drain_file
        while file is not None:
            await asyncio.sleep(_DRAIN_POLL_S)
            if file.exists():
                rolling.abandon()
                if upstreams.swapping is not None:
                    upstreams.swapping.refuse()
                seconds = self._settings.drain_timeout
                await asyncio.gather(*(one.drain_worker(seconds) for one in upstreams))
                file.unlink(missing_ok=True)

    def _listener(
        self, listening: socket.socket, gate: Gate, moderation: ReadModeration
    ) -> Listener:
        def connection() -> ClientConnection:
            return ClientConnection(gate, self._limits, self._connections, moderation)

        return Listener(listening, connection)

    def _gate(self, name: str, listening: socket.socket, upstreams: Upstreams) -> Gate:
        settings = self._settings
        access = Access(settings.api_key, is_loopback(listening.getsockname()[0]))
        common = (Route(upstreams, name), access, self._limits, self._large_bodies)
        public = settings.metrics_public
        match name:
            case "PORT":
                has_page = settings.openai_page and "OPENAI_PORT" in upstreams.serving.ports
                page_port = settings.openai_port if has_page else None
                return CogGate(*common, self._webhooks, page_port)
            case "TRITON_HTTP_PORT":
                return TritonGate(*common)
            case "OPENAI_PORT":
                page = settings.openai_page
                return OpenAIGate(*common, metrics_public=public, page=page)
            case _:
                return MetricsGate(*common, metrics_public=public)

    def _on_signal(self, upstreams: Upstreams) -> None:
        self._stops += 1
        self._stopped.set()
        for upstream in upstreams:
            upstream.backends.close()
            if upstream.chain is not None and self._stops == 1:
                upstream.chain.reaper.terminate()
            elif upstream.chain is not None and self._stops == 2:
                asyncio.get_running_loop().run_in_executor(None, upstream.chain.reaper.kill)

    async def _flush(self) -> None:
        """Let clients have what was answered before the end."""
        deadline = asyncio.get_running_loop().time() + _FLUSH_S
        while self._connections.busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_S)
