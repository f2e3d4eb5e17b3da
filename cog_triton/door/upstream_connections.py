"""Connections to the servers behind the door: some are made before a request needs them."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

_WARM = 8
_REFILL_S = 0.05
_CONNECT_TIMEOUT_S = 5.0
_REQUEST = (
    b"%b %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)
_MAX_BYTES = 1 << 20


class UpstreamConnections:
    """Opens a connection for each request; those to `warm` ports may have been open before.

    A port gets warm connections once a request has reached it. Each serves one request.
    """

    def __init__(self, warm: Collection[int] = ()) -> None:
        self._warm = frozenset(warm)
        self._idle: dict[int, deque[_Idle]] = {}
        self._refills: dict[int, asyncio.Task[None]] = {}
        self.closed = False
        self.in_flight = 0
        """Requests that were passed on, and whose responses have not ended."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context of a request that is passed on, until its response has ended."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

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

    def __init__(self, connections: UpstreamConnections, among: deque[_Idle]) -> None:
        self._backends = connections
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


async def ask(
    port: int,
    method: bytes,
    path: bytes,
    on_connected: Callable[[], None] = lambda: None,
    body: bytes = b"",
) -> tuple[int, bytes]:
    """Status and body of the response of 127.0.0.1:`port` to a request with the JSON `body`.

    Raises OSError where nobody listens, and ValueError if it is cut short.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        on_connected()
        writer.write(_REQUEST % (method, path, len(body), body))
        answer = await reader.read(_MAX_BYTES)
        while more := await reader.read(_MAX_BYTES):
            answer += more
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    head, _, answered = answer.partition(b"\r\n\r\n")
    return int(head[9:12]), answered


async def read_json(
    port: int, path: bytes, on_connected: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The JSON object that a GET of `path` is answered with, of any status; raises as `ask`."""
    _, body = await ask(port, b"GET", path, on_connected)
    value = json.loads(body)
    if not isinstance(value, dict):
        raise ValueError(f"{path.decode()}: not a JSON object")
    return value
