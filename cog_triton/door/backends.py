"""Connections to the servers behind the door: some are made before a request needs them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, cast

from cog_triton.system.shared_time import SharedTime

_WARM = 8
_REFILL_S = 0.05
_CONNECT_TIMEOUT_S = 5.0
_LOG = logging.getLogger(__name__)


class Relayed(Protocol):
    """A response that is being passed on."""

    def break_off(self) -> None:
        """End it now."""


class TritonUse:
    """Use of Triton's own API through the door, which the worker reads when an engine has died.

    The time is inf while a request is in flight, else that of the end of the last one.
    """

    def __init__(self, file: Path) -> None:
        """`file`, which must be new, is where the worker finds it; raises OSError."""
        self.file = file
        self._time = SharedTime(file)
        self._time.set(-math.inf)
        self._in_flight = 0

    @classmethod
    def made(cls, file: Path) -> TritonUse | None:
        """One in `file`, None where that cannot be made: the worker then blames nobody."""
        try:
            return cls(file)
        except OSError as error:
            _LOG.warning("no request is blamed for a death, as %s cannot be made: %s", file, error)
            file.unlink(missing_ok=True)
            return None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context of an inference request, until its response has ended."""
        self._in_flight += 1
        self._time.set(math.inf)
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._time.set(time.monotonic())


class Backends:
    """Opens a connection for each request; those to `warm` ports may have been open before.

    A port gets warm connections once a request has reached it. Each serves one request.
    """

    def __init__(self, warm: Collection[int] = ()) -> None:
        self._warm = frozenset(warm)
        self._idle: dict[int, deque[_Idle]] = {}
        self._refills: dict[int, asyncio.Task[None]] = {}
        self.closed = False
        self._relays: set[Relayed] = set()

    @contextmanager
    def request(self, relay: Relayed) -> Iterator[None]:
        """Context of a request that is passed on, until its response has ended."""
        self._relays.add(relay)
        try:
            yield
        finally:
            self._relays.remove(relay)

    @property
    def in_flight(self) -> int:
        """Requests that were passed on, and whose responses have not ended."""
        return len(self._relays)

    def break_off(self) -> None:
        """End all responses, as if the servers behind had broken off."""
        for relay in tuple(self._relays):
            relay.break_off()

    async def connect(self, protocol: asyncio.Protocol, port: int) -> None:
        """Give `protocol` a connection to 127.0.0.1:`port`; raises OSError without one."""
        loop = asyncio.get_running_loop()
        if (warm := self._take(port)) is not None:
            warm.set_protocol(protocol)
            protocol.connection_made(warm)
        else:
            await loop.create_connection(lambda: protocol, "127.0.0.1", port)
        if port in self._warm and port not in self._refills and not self.closed:
            self._refills[port] = refill = loop.create_task(self._refill(port))
            refill.add_done_callback(lambda _: self._refills.pop(port))

    @property
    def refilling(self) -> bool:
        """Whether connections are being made that no request waits for."""
        return bool(self._refills)

    def close(self) -> None:
        """Close what no request uses, for good: a server that drains may wait for it."""
        self.closed = True
        for refill in self._refills.values():
            refill.cancel()
        for idle in self._idle.values():
            while idle:
                idle.popleft().transport.abort()

    def _take(self, port: int) -> asyncio.Transport | None:
        """The warm connection that is open for longest: servers give them to threads in turn."""
        idle = self._idle.get(port)
        while idle:
            transport = idle.popleft().transport
            if not transport.is_closing():
                return transport
        return None

    async def _refill(self, port: int) -> None:
        idle = self._idle.setdefault(port, deque())
        loop = asyncio.get_running_loop()
        # A request that finds none warm connects itself.
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.sleep(_REFILL_S)  # after those that wait for an answer
            for _ in range(_WARM - len(idle)):  # once each: a server may end them all at once
                connecting = loop.create_connection(lambda: _Idle(self, idle), "127.0.0.1", port)
                await asyncio.wait_for(connecting, _CONNECT_TIMEOUT_S)


class _Idle(asyncio.Protocol):
    """A connection that no request has used; one that its server ends is forgotten."""

    def __init__(self, backends: Backends, among: deque[_Idle]) -> None:
        self._backends = backends
        self._among = among

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from no class of asyncio.
        self.transport = cast(asyncio.Transport, transport)
        if self._backends.closed:  # while it was being made: nobody else has it
            self.transport.abort()
        else:
            self._among.append(self)

    def data_received(self, data: bytes) -> None:
        self.transport.abort()  # a server that speaks first answers something else

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._among:
            self._among.remove(self)
