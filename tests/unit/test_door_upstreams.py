"""What is behind the door: private ports, and orders to the server."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from small_door import gates, on_loop, opened, read_request, until

from cog_triton.door.upstream import Chain, PrivatePorts, Route, Upstream, cog_environment
from cog_triton.ipc.streams import Stream
from cog_triton.serving.cog_messages import Cancel, Drain
from cog_triton.settings import load_settings
from cog_triton.system import local_socket
from cog_triton.system.ports import free_ports, reserve

NAMES = ("PORT", "TRITON_HTTP_PORT", "TRITON_METRICS_PORT")


def test_a_reserved_port_is_for_whoever_is_told_it() -> None:
    reserved = reserve()
    port = reserved.getsockname()[1]
    assert port not in free_ports(50)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):  # sets SO_REUSEADDR, as servers do
        socket.create_connection(("127.0.0.1", port)).close()
    reserved.close()


def test_what_is_behind_the_door_has_private_ports_of_loopback_and_no_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"COG_HOST": "0.0.0.0", "OPENAI_PORT": "", "DRAIN_TIMEOUT": "3"}
    given |= {"COG_TRITON_API_KEY": "secret", "OPENAI_API_KEY": "old secret"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    reserved = PrivatePorts(NAMES)
    private = reserved.numbers
    settings = load_settings()
    found = cog_environment(settings, private)
    assert (found["COG_HOST"], found["TRITON_HOST"]) == ("127.0.0.1", "127.0.0.1")
    assert {name: int(found[name]) for name in NAMES} == private
    assert len(set(private.values())) == 3
    assert (found["OPENAI_PORT"], found["DRAIN_TIMEOUT"]) == ("", "3")
    assert settings.api_key == "secret"
    assert "secret" not in str(found)
    reserved.close()


def test_public_ports_are_tritons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_HOST", "0.0.0.0")
    hosts = {name: host for name, (host, _) in load_settings().public_ports.items()}
    assert hosts == dict.fromkeys(NAMES, "0.0.0.0")
    monkeypatch.setenv("TRITON_HOST", "127.0.0.1")
    monkeypatch.setenv("OPENAI_PORT", "8080")
    hosts = {name: host for name, (host, _) in load_settings().public_ports.items()}
    assert (hosts["TRITON_HTTP_PORT"], hosts["OPENAI_PORT"]) == ("127.0.0.1", "0.0.0.0")


@asynccontextmanager
async def taking(listening: socket.socket) -> AsyncIterator[list[Any]]:
    """The orders that a server gets there."""
    orders: list[Any] = []

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        orders.append(await Stream(reader, writer).receive())
        writer.close()

    async with await asyncio.start_unix_server(obey, sock=listening):
        yield orders


class Chained:
    """A reaper, and its ports, that end as soon as they are asked to."""

    ended = False

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def terminate(self) -> None:
        self.ended = True

    kill = close = terminate


def new_address() -> str:
    return f"cog-triton-{secrets.token_hex(16)}"


def route_to_cog(port: int, address: str, status: str = "READY") -> Route:
    chained: Any = Chained()
    upstream = Upstream({"PORT": port}, Chain(chained, chained, address))
    upstream.state._withheld, upstream.state.listens = None, True
    upstream.state._inputs = frozenset({"prompt"})
    upstream.state._take({"status": status})
    return Route(upstream, "PORT")


@on_loop
async def test_a_prediction_is_cancelled_by_its_client_however_it_leaves() -> None:
    asked: list[bytes] = []

    async def cog(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await read_request(reader))
        if b"/cancel " in asked[-1]:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n12c\r\n" + b"a" * 300 + b"\r\n")
        if b"/whole " in asked[-1]:
            writer.write(b"0\r\n\r\n")
        else:
            await reader.read()
        writer.close()

    backend = await asyncio.start_server(cog, "127.0.0.1", 0)
    address = new_address()
    async with taking(local_socket.listen(address)) as orders:
        gate = gates(route_to_cog(backend.sockets[0].getsockname()[1], address))["cog"]
        async with opened(gate) as door:
            head = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
            assert b" 200 " in await door.ask(b"PUT /predictions/whole" + head)
            reader, writer = await door.connect()
            writer.write(b"POST /predictions" + head)
            await reader.readuntil(b"aa")
            writer.close()
            await until(lambda: bool(orders))
            await door.ask(b"POST /predictions/a%7Eb/cancel" + head)
            await until(lambda: len(orders) == 2)
        named = re.match(rb"PUT /predictions/(pred_[0-9a-f]{16}) HTTP/", asked[1])
        assert named
        assert orders == [Cancel(named[1].decode()), Cancel("a~b")]
    backend.close()


@on_loop
async def test_a_drain_is_an_order_to_the_server_for_the_time_that_is_left() -> None:
    address = new_address()
    async with taking(local_socket.listen(address)) as orders:
        upstream = route_to_cog(1, address).upstream
        await upstream.drain(600)
        (drain,) = orders
        assert isinstance(drain, Drain)
        assert 0 < drain.seconds <= 600
        assert upstream.exit_code() == 0


@on_loop
async def test_orders_wait_for_room_in_the_servers_queue() -> None:
    address = new_address()
    with local_socket.listen(address) as listening:
        upstream = route_to_cog(1, address).upstream
        for number in range(100):
            upstream.cancel(str(number))
        await asyncio.sleep(0.1)
        async with taking(listening) as orders:
            await until(lambda: not upstream._cancelling)
        assert len(orders) == 100


@on_loop
async def test_a_server_that_is_gone_needs_no_orders(caplog: pytest.LogCaptureFixture) -> None:
    upstream = route_to_cog(1, new_address()).upstream
    upstream.cancel("a")
    await upstream.drain(600)
    await until(lambda: not upstream._cancelling)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["Drain"]
