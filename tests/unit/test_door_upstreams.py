"""Upstreams of the door: private ports, and who gets new requests."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from small_door import answering, on_loop, opened, read_request, served

from cog_triton.door.access import Access
from cog_triton.door.gate import OpenAIGate
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.request_parser import Limits
from cog_triton.door.upstream import PrivatePorts, Route, Upstream, Upstreams, cog_environment
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports, reserve

REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


def naming(name: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(name), name)


@on_loop
async def test_a_connection_that_is_kept_follows_the_switch() -> None:
    async with served(answering(naming(b"old"))) as one, served(answering(naming(b"new"))) as b:
        old = Upstream("old", {"OPENAI_PORT": one.gate.port})
        new = Upstream("new", {"OPENAI_PORT": b.gate.port})
        upstreams = Upstreams(old)
        upstreams.add(new)
        async with opened(gate(upstreams)) as door:
            reader, writer = await door.connect()
            said = []
            for upstream in (old, new, old):
                upstreams.serving = upstream
                writer.write(REQUEST)
                said.append((await reader.readuntil(b"\r\n\r\n"), await reader.readexactly(3)))
            assert [name for _, name in said] == [b"old", b"new", b"old"]
        old.close()
        new.close()


@on_loop
async def test_a_request_in_flight_ends_where_it_began() -> None:
    go_on = asyncio.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await go_on.wait()
        writer.write(naming(b"old"))
        writer.close()

    async with served(slowly) as one, served(answering(naming(b"new"))) as other:
        old = Upstream("old", {"OPENAI_PORT": one.gate.port})
        new = Upstream("new", {"OPENAI_PORT": other.gate.port})
        upstreams = Upstreams(old)
        upstreams.add(new)
        async with opened(gate(upstreams)) as door:
            first = asyncio.ensure_future(door.ask(REQUEST[:-2] + b"connection: close\r\n\r\n"))
            while not old.connections.in_flight:
                await asyncio.sleep(0.005)
            upstreams.serving = new
            assert (await door.ask(REQUEST[:-2] + b"connection: close\r\n\r\n"))[-3:] == b"new"
            assert (old.connections.in_flight, new.connections.in_flight) == (1, 0)
            go_on.set()
            assert (await first)[-3:] == b"old"
            assert old.connections.in_flight == 0
        old.close()
        new.close()


@on_loop
async def test_a_refusal_is_the_gates_own() -> None:
    upstreams = Upstreams(Upstream("one", {"OPENAI_PORT": 1}))
    async with opened(gate(upstreams)) as door:
        answer = await door.ask(REQUEST[:-2] + b"connection: close\r\n\r\n")
        assert b" 503 " in answer
        assert "E2105" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def gate(upstreams: Upstreams) -> OpenAIGate:
    bodies = LargeBodies()
    route = Route(upstreams, "OPENAI_PORT")
    return OpenAIGate(route, Access(None, loopback=False), Limits(), bodies, metrics_public=False)


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


def test_what_is_behind_the_door_listens_on_private_ports_of_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COG_HOST", "0.0.0.0")
    monkeypatch.setenv("OPENAI_PORT", "")
    monkeypatch.setenv("DRAIN_TIMEOUT", "3")
    reserved = PrivatePorts(NAMES)
    private = reserved.numbers
    found = cog_environment(load_settings(), private)
    assert (found["COG_HOST"], found["TRITON_HOST"]) == ("127.0.0.1", "127.0.0.1")
    assert {name: int(found[name]) for name in NAMES} == private
    assert len(set(private.values())) == 3
    assert (found["OPENAI_PORT"], found["DRAIN_TIMEOUT"]) == ("", "3")
    reserved.close()


def test_keys_stay_in_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_TRITON_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "old secret")
    settings = load_settings()
    assert settings.api_key == "secret"
    assert "secret" not in str(cog_environment(settings, {}))
    monkeypatch.delenv("COG_TRITON_API_KEY")
    assert load_settings().api_key == "old secret"


def test_public_ports_are_tritons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_HOST", "0.0.0.0")
    hosts = {name: host for name, (host, _) in load_settings().public_ports.items()}
    assert hosts == dict.fromkeys(NAMES, "0.0.0.0")
    monkeypatch.setenv("TRITON_HOST", "127.0.0.1")
    monkeypatch.setenv("OPENAI_PORT", "8080")
    hosts = {name: host for name, (host, _) in load_settings().public_ports.items()}
    assert (hosts["TRITON_HTTP_PORT"], hosts["OPENAI_PORT"]) == ("127.0.0.1", "0.0.0.0")
