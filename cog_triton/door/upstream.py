"""Upstream of the front door: one backend chain, from its launch to its graceful drain."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from cog_triton.door.cog_state import CogState
from cog_triton.door.upstream_connections import UpstreamConnections
from cog_triton.errors import CogTritonError
from cog_triton.ipc.framing import frame
from cog_triton.ipc.messages import encode
from cog_triton.serving.cog_health import CogWatch
from cog_triton.serving.cog_messages import ADDRESS_VARIABLE, Cancel, Drain
from cog_triton.serving.coglet import cog_server
from cog_triton.settings import Settings
from cog_triton.system import local_socket, reaper
from cog_triton.system.ports import reserve
from cog_triton.system.reaper import Reaped

# Not Triton's: it gives a connection to one of its threads when it accepts it.
_WARM = ("PORT", "OPENAI_PORT")
_POLL_S = 0.02
_WEBHOOKS_S = 0.5
# With those of the front door, 13.5 s: platforms are told to wait 15 s longer than DRAIN_TIMEOUT.
_WORKER_S = 4.0
_CANCEL_S = 5.0
_EXIT_S = 5.0
_ANSWER_S = 15.0
_LOG = logging.getLogger(__name__)


class PrivatePorts:
    """A port for each of the settings `names`, kept from others until it is closed."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sockets: dict[str, socket.socket] = {name: reserve() for name in names}
        self.numbers = {name: found.getsockname()[1] for name, found in self._sockets.items()}

    def close(self) -> None:
        """Give the ports back."""
        for found in self._sockets.values():
            found.close()


@dataclass(frozen=True)
class Chain:
    """Processes of an upstream: their `reaper`, their ports, and the `address` of the server.

    A Cog that builds has no server.
    """

    reaper: Reaped
    reserved: PrivatePorts
    address: str | None


class Upstream:
    """One backend chain: Cog and Triton, on `ports` of 127.0.0.1 by the names of their settings.

    `chain` is None for a Triton that someone else has started.
    """

    def __init__(
        self,
        ports: Mapping[str, int],
        chain: Chain | None = None,
        start_timeout: float = 0.0,
    ) -> None:
        self.ports = ports
        self.chain = chain
        self.connections = UpstreamConnections({ports[port] for port in _WARM if port in ports})
        self._address = None if chain is None else chain.address
        self.state = CogState(ports.get("PORT", 0), self._address, start_timeout)
        self.stopping = False
        """Whether the door drains: no new request is taken any more."""
        self.ask_to_stop: Callable[[], None] = lambda: None
        """Begins the graceful stop of the door."""
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelling: set[asyncio.Future[None]] = set()

    def follow(self) -> None:
        """Keep `state` current."""
        if "PORT" in self.ports:
            self._tasks.append(asyncio.get_running_loop().create_task(self.state.watch()))

    def watch(self, settings: Settings) -> None:
        """Kill a chain that hangs after it was ready."""
        if self.chain is not None:
            guard = self._kill_if_lost(settings, self.chain.reaper)
            self._tasks.append(asyncio.get_running_loop().create_task(guard))

    async def ended(self) -> int:
        """Wait until the chain has ended; its exit code."""
        assert self.chain is not None
        return await asyncio.to_thread(self.chain.reaper.wait)

    def exit_code(self) -> int | None:
        """Exit code of a chain that has ended, else None."""
        return None if self.chain is None else self.chain.reaper.poll()

    async def drain(self, seconds: float) -> None:
        """Graceful drain of a chain that gets no new requests; then its processes are stopped.

        Requests end undisturbed within `seconds`; those that are left end with E2105.
        """
        deadline = time.monotonic() + seconds
        self.connections.close()
        await self._until(lambda: not self.connections.in_flight, deadline)
        # Asynchronous predictions have no connection: the worker knows of them.
        if self.state.is_set_up:
            left = max(0.0, deadline - time.monotonic())
            await self._order(Drain(left), left + _WORKER_S)
        if self.chain is not None and self.exit_code() is None:
            await asyncio.sleep(_WEBHOOKS_S)
            self.chain.reaper.terminate()
            await self._until(lambda: False, time.monotonic() + _EXIT_S)
        await asyncio.to_thread(self.close)

    def cancel(self, prediction: str) -> None:
        """Have the server cancel a prediction, of which it may not know yet."""
        if self._address is not None:
            task = asyncio.ensure_future(self._order(Cancel(prediction), _CANCEL_S))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def _order(self, order: object, seconds: float) -> None:
        """Give the server an order, and wait until it has obeyed, or is gone."""
        if self._address is None:
            return
        own = socket.socket(socket.AF_UNIX)
        own.setblocking(False)
        try:
            async with asyncio.timeout(seconds):
                while not _connected(own, self._address):
                    await asyncio.sleep(_POLL_S)
                reader, writer = await asyncio.open_unix_connection(sock=own)
                with closing(writer):
                    writer.write(frame(encode(order)))
                    await reader.read()
        except (OSError, TimeoutError) as error:
            level = logging.DEBUG if isinstance(order, Cancel) else logging.WARNING
            _LOG.log(level, "%s: the server has not obeyed: %r", type(order).__name__, error)
            own.close()

    def close(self) -> None:
        """Kill what is left of the chain, and give its ports back; blocks until it is gone."""
        self.connections.close()
        if self.chain is not None:
            self.chain.reaper.kill()
            self.chain.reserved.close()

    def stop_watching(self) -> None:
        """End the tasks of `follow` and `watch`."""
        for task in self._tasks:
            task.cancel()

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        """Wait for `condition`, while the chain runs and the monotonic clock allows."""
        while not condition() and time.monotonic() < deadline and self.exit_code() is None:
            await asyncio.sleep(_POLL_S)

    async def _kill_if_lost(self, settings: Settings, process: Reaped) -> None:
        """Kill a chain that is lost; its end is then that of the door, with an exit code."""
        # One may hang before it has told us that it is ready.
        while not (self.state.is_set_up or self.state.hangs):
            await asyncio.sleep(_POLL_S)
        watch = CogWatch(settings, "127.0.0.1", self.ports["PORT"], process.process.pid)
        while not self.connections.closed:
            await asyncio.sleep(settings.cog_probe_period)
            try:
                line = await asyncio.to_thread(watch.check)
            except CogTritonError as error:
                _LOG.error("%s", error)
                await asyncio.to_thread(process.kill)
                return
            if line:
                _LOG.warning("%s", line)


def _connected(own: socket.socket, name: str) -> bool:
    """Connect without waiting: False while the server's queue of connections is full.

    An event loop takes a Unix socket for connected then.
    """
    try:
        own.connect(local_socket.address(name))
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Route:
    """Way from a public port to the servers behind it: `port` is the name of its setting."""

    upstream: Upstream
    port: str


_REAP_S = 15
_SECRETS = (
    *("COG_TRITON_API_KEY", "OPENAI_API_KEY", "COG_TRITON_KEYS"),
    *("TLS_CERT_FILE", "TLS_KEY_FILE"),
)
_LOOPBACK = "127.0.0.1"


def start_chain(settings: Settings, names: Sequence[str], for_cog: Sequence[str]) -> Upstream:
    """Start a server with private ports for the public ones in `names`; it is not ready yet.

    Where only PORT is public, it is a Cog that builds. `for_cog` are arguments of cog.server.http.
    Raises OSError if that cannot be done, and E2106 if another user has Cog's directory.
    """
    reserved = PrivatePorts(names)
    builds = "TRITON_HTTP_PORT" not in names
    address = None if builds else f"cog-triton-{secrets.token_hex(16)}"
    environment = _with_direct_loopback(cog_environment(settings, reserved.numbers))
    if address is None:
        cog_server.take_place()
        command, environment = cog_server.command(for_cog), cog_server.environment(environment)
    else:
        command = [sys.executable, "-m", "cog_triton.serving.server", *for_cog]
        environment[ADDRESS_VARIABLE] = address
    try:
        process = reaper.spawn(command, grace=settings.drain_timeout + _REAP_S, env=environment)
    except BaseException:
        reserved.close()
        raise
    chain = Chain(process, reserved, address)
    return Upstream(reserved.numbers, chain, settings.triton_start_timeout)


def cog_environment(settings: Settings, private: Mapping[str, int]) -> dict[str, str]:
    """The environment of a Cog behind the door: it and what it starts listen on `private` ports.

    Keys stay in the door.
    """
    return {
        **{name: value for name, value in os.environ.items() if name not in _SECRETS},
        "COG_HOST": _LOOPBACK,
        "TRITON_HOST": _LOOPBACK,
        "COG_TRITON_KEY_AT_DOOR": str(bool(settings.api_key or settings.has_tenants)).lower(),
        "COG_TRITON_TENANTS_AT_DOOR": str(settings.has_tenants).lower(),
        **{name: str(port) for name, port in private.items()},
    }


def _with_direct_loopback(environment: dict[str, str]) -> dict[str, str]:
    """`environment` in which no proxy is asked for 127.0.0.1, where coglet posts webhooks."""
    direct = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if "*" not in direct.split(","):
        direct = f"{direct},127.0.0.1".lstrip(",")
    return {**environment, "no_proxy": direct, "NO_PROXY": direct}
