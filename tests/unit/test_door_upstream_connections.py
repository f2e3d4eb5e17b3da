"""Connections to servers behind the door that are made before a request needs them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
import small_door
from small_door import on_loop, run, served, until

from cog_triton.door.upstream_connections import UpstreamConnections

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
WARM = 8


@dataclass
class Server:
    """Answers one request a connection; `used` has the numbers of connections that got one."""

    greeting: bytes = b""
    opened: int = 0
    closed: int = 0
    used: list[int] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        number = self.opened
        self.writers.append(writer)
        writer.write(self.greeting)
        try:
            await small_door.read_request(reader)
            self.used.append(number)
            writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.closed += 1
        writer.close()

    @property
    def idle(self) -> int:
        return self.opened - self.closed


@on_loop
async def test_requests_take_connections_that_are_open_in_turn() -> None:
    server = Server()
    async with served(server, warm=True) as door:
        assert (await door.ask(REQUEST)).endswith(b"ok")
        await until(lambda: server.idle == WARM)
        for _ in range(3):
            assert (await door.ask(REQUEST)).endswith(b"ok")
        assert server.used[:4] == [1, 2, 3, 4]
        await until(lambda: server.opened == 4 + WARM)


@on_loop
async def test_no_connection_is_open_before_the_first_request() -> None:
    server = Server()
    async with served(server, warm=True):
        await asyncio.sleep(0.1)
        assert server.opened == 0


@on_loop
async def test_without_warm_ports_each_request_connects() -> None:
    server = Server()
    async with served(server) as door:
        for number in (1, 2):
            assert (await door.ask(REQUEST)).endswith(b"ok")
            await asyncio.sleep(0.1)
            assert server.opened == number


@on_loop
async def test_connections_that_the_server_has_closed_are_not_used() -> None:
    server = Server()
    async with served(server, warm=True) as door:
        await door.ask(REQUEST)
        await until(lambda: server.idle == WARM)
        for writer in server.writers:
            writer.transport.abort()
        await until(lambda: server.idle == 0)
        for _ in range(WARM + 1):
            assert (await door.ask(REQUEST)).endswith(b"ok")


@on_loop
async def test_what_a_server_says_unasked_is_no_answer() -> None:
    server = Server(greeting=b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
    async with served(server, warm=True) as door:
        await door.ask(REQUEST)
        await until(lambda: server.closed >= WARM)
        server.greeting = b""
        await until(lambda: server.idle == 0)
        assert (await door.ask(REQUEST)).endswith(b"ok")


@on_loop
async def test_many_requests_at_once_are_all_answered() -> None:
    server = Server()
    async with served(server, warm=True) as door:
        await door.ask(REQUEST)
        await until(lambda: server.idle == WARM)
        answers = await asyncio.gather(*(door.ask(REQUEST) for _ in range(5 * WARM)))
        assert all(answer.endswith(b"ok") for answer in answers)
        assert len(server.used) == len(set(server.used)) == 5 * WARM + 1


@on_loop
async def test_closing_ends_idle_connections_for_good() -> None:
    server = Server()
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connections = UpstreamConnections({port})
    await connections.connect(asyncio.Protocol(), port)
    await until(lambda: server.idle == 1 + WARM)
    connections.close()
    await until(lambda: server.idle == 1)
    await connections.connect(asyncio.Protocol(), port)
    await until(lambda: server.idle >= 2)
    await asyncio.sleep(0.1)
    assert server.idle == 2
    for writer in server.writers:
        writer.transport.abort()
    listening.close()


def test_closing_ends_connections_that_are_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cog_triton.door.upstream_connections._REFILL_S", 0)

    async def check() -> None:
        server = Server()
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        for turns in range(60):  # of the event loop: at each of them another step has been made
            connections = UpstreamConnections({port})
            await connections.connect(asyncio.Protocol(), port)
            for _ in range(turns):
                await asyncio.sleep(0)
            connections.close()
        await until(lambda: server.idle == 60)  # those that were asked for
        for writer in server.writers:
            writer.transport.abort()
        listening.close()

    run(check())


@on_loop
async def test_refilling_ends_with_the_server_and_begins_again() -> None:
    server = Server()
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connections = UpstreamConnections({port})
    await connections.connect(asyncio.Protocol(), port)
    listening.close()
    for writer in server.writers:
        writer.transport.abort()
    await until(lambda: not connections._refills)
    listening = await asyncio.start_server(server, "127.0.0.1", port)
    before = server.opened
    await connections.connect(asyncio.Protocol(), port)
    await until(lambda: server.opened == before + 1 + WARM)
    connections.close()
    for writer in server.writers:
        writer.transport.abort()
    listening.close()
