"""What is behind the door: private ports, and an answer if nobody listens there."""

from __future__ import annotations

import json
import socket

import pytest
from small_door import on_loop, opened

from cog_triton.door.access import Access
from cog_triton.door.gate import OpenAIGate
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.request_parser import Limits
from cog_triton.door.upstream import PrivatePorts, Route, Upstream, cog_environment
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports, reserve

REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@on_loop
async def test_a_refusal_is_the_gates_own() -> None:
    route = Route(Upstream({"OPENAI_PORT": 1}), "OPENAI_PORT")
    access = Access(None, loopback=False)
    gate = OpenAIGate(route, access, Limits(), LargeBodies(), metrics_public=False)
    async with opened(gate) as door:
        answer = await door.ask(REQUEST[:-2] + b"connection: close\r\n\r\n")
        assert b" 503 " in answer
        assert "E2105" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


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
