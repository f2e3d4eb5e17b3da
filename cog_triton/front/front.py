"""The front: a listener and a gate for each public port of this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp

from cog_triton.front.access import Access, GuessLimit, Refusals, is_loopback
from cog_triton.front.cog_gate import CogGate
from cog_triton.front.cog_state import Upstream
from cog_triton.front.file_reader import keep_current
from cog_triton.front.gate import MetricsGate, OpenAIGate, PrivateGate
from cog_triton.front.http_protocol import Connections, PublicPort
from cog_triton.front.keyring import Keyring
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.listener import Certificate, Listener
from cog_triton.front.message import Limits
from cog_triton.front.triton_gate import TritonGate
from cog_triton.front.webhook_relay import WebhookRelay, WebhookRules
from cog_triton.settings import Settings

_FLUSH_S = 1.0
_POLL_S = 0.02
Patience = Callable[[], bool]
"""Whether to wait longer."""


class Front:
    """Serves on listening sockets, by the names of their settings, what an upstream answers."""

    def __init__(
        self,
        settings: Settings,
        descriptors: int,
        sockets: Mapping[str, socket.socket],
        upstream: Upstream,
        applications: Mapping[str, ASGIApp],
    ) -> None:
        """`applications` are those of this process, by the same names.

        `descriptors` is the limit of open files of this process. Raises E1005 for wrong keys.
        """
        self._settings = settings
        self._upstream = upstream
        self._limits = Limits.of(settings, descriptors)
        self._connections = Connections(self._limits.connections, self._limits.all_bodies_bytes)
        self._large_bodies = LargeBodies()
        self.webhooks = WebhookRelay(WebhookRules.of(settings))
        self._guesses = GuessLimit()
        self.refusals = Refusals()
        keys, chain = settings.cog_triton_keys, settings.tls_cert_file
        self._sockets, self._applications = sockets, applications
        self._keyring = None if keys is None else Keyring(keys, settings.api_key)
        key = settings.tls_key_file or chain
        self._certificate = Certificate(chain, key) if chain and key else None
        self._listeners: list[Listener] = []
        if "PORT" in sockets:
            self.webhooks.start()
        readers = [each for each in (self._keyring, self._certificate) if each is not None]
        self._watching = asyncio.ensure_future(keep_current(readers))

    def listen(self) -> None:
        """Begin to serve."""
        for name, listening in self._sockets.items():
            gate = self._gate(name, listening, self._applications.get(name))
            port = PublicPort(gate, self._limits, self._connections)
            self._listeners.append(Listener(listening, port.connection, self._certificate))

    async def drain(self, more: Patience) -> None:
        """Refuse what is new, and wait for what is answered, as long as `more` says so."""
        self._upstream.stopping = True
        self._connections.refuse_reuse()
        while (self._connections.answering or self._connections.may_ask) and more():
            await asyncio.sleep(_POLL_S)

    async def flush(self, more: Patience) -> None:
        """Let clients have what was answered, and how the rest has ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _FLUSH_S
        while (self._connections.answering and loop.time() < end) or (
            self._connections.has_unread and more()
        ):
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close every connection, and give up webhooks, with a line in the log."""
        self._watching.cancel()
        await self.webhooks.close()
        for listener in self._listeners:
            listener.close()
        self._large_bodies.close()
        self._connections.abort_all()
        await asyncio.sleep(0)

    def _gate(self, name: str, listening: socket.socket, app: ASGIApp | None) -> PrivateGate:
        settings = self._settings
        loopback = is_loopback(listening.getsockname()[0])
        access = Access(settings.api_key, loopback, self._keyring, self._guesses, self.refusals)
        common = (self._upstream, name, access, self._limits, self._large_bodies)
        public = settings.metrics_public
        match name:
            case "PORT":
                page_port = settings.openai_port if settings.openai_page else None
                return CogGate(*common, self.webhooks, page_port, settings.scheme)
            case "TRITON_HTTP_PORT":
                return TritonGate(*common)
            case "OPENAI_PORT":
                page = settings.openai_page
                return OpenAIGate(*common, metrics_public=public, app=app, page=page)
            case _:
                return MetricsGate(*common, metrics_public=public, app=app)
