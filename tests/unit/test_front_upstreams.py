"""What is behind the front: private ports, and predictions that clients wait for or leave."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from small_front import behind, gates, on_loop, opened, read_request, route_to, until

from cog_triton.front import cog_gate
from cog_triton.front.access import Access
from cog_triton.front.keyring import Key, Keyring, sha256_of
from cog_triton.settings import load_settings

NAMES = ("PORT", "TRITON_HTTP_PORT", "TRITON_METRICS_PORT")


def test_public_ports_are_tritons_too() -> None:
    def hosts(**values: Any) -> dict[str, str]:
        found = load_settings(cog_host="0.0.0.0", **values).public_ports
        return {name: host for name, (host, _) in found.items()}

    assert hosts() == dict.fromkeys(NAMES, "0.0.0.0")
    found = hosts(triton_host="127.0.0.1", openai_port=8080)
    assert (found["TRITON_HTTP_PORT"], found["OPENAI_PORT"]) == ("127.0.0.1", "0.0.0.0")


HEAD = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n"
ASKED = HEAD + b"\r\n{}"


class Cog:
    """Begins an event stream for each prediction, which ends if its id is `whole`; cancels some."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.knows = b"HTTP/1.1 200 OK"

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(request := await read_request(reader))
        if b"/cancel " in request:
            writer.write(self.knows + b"\r\ncontent-length: 2\r\n\r\n{}")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"transfer-encoding: chunked\r\n\r\n12c\r\n" + b"a" * 300 + b"\r\n")
            writer.write(b"0\r\n\r\n" if b"/whole " in request else b"")
            await reader.read(0 if b"/whole " in request else 1)
        writer.close()


def gate_to(port: int, access: Access | None = None) -> tuple[Any, list[str]]:
    """Cog's gate, and the ids of predictions that it has cancelled."""
    route = route_to(port, status="READY")
    route[0].state._inputs = frozenset({"prompt"})
    cancelled: list[str] = []
    route[0].cancel = cancelled.append
    return gates(route, access)["cog"], cancelled


@on_loop
async def test_a_prediction_is_cancelled_when_its_last_client_leaves() -> None:
    async with behind(cog := Cog()) as port:
        gate, cancelled = gate_to(port)
        async with opened(gate) as front:
            assert b" 200 " in await front.ask(b"PUT /predictions/whole" + ASKED)
            assert (cancelled, gate.upstream.predictions) == ([], {})
            clients = [await front.connect() for _ in range(3)]
            paths = (b"POST /predictions", b"PUT /predictions/a", b"PUT /predictions/a")
            for (reader, writer), path in zip(clients, paths, strict=True):
                writer.write(path + ASKED)
                await reader.readuntil(b"aa")
            clients[0][1].close()
            await until(lambda: len(cancelled) == 1)
            clients[1][1].close()
            await until(lambda: gate.upstream.predictions["a"].clients == 1)
            assert len(cancelled) == 1
            clients[2][1].close()
            await until(lambda: cancelled[1:] == ["a"])
            assert gate.upstream.predictions == {}
    named = re.match(rb"PUT /predictions/(pred_[0-9a-f]{16}) HTTP/", cog.asked[1])
    assert named
    assert cancelled[0] == named[1].decode()


@on_loop
async def test_what_cog_knows_is_cancelled_and_what_it_does_not_know_yet() -> None:
    async with behind(cog := Cog()) as port:
        gate, cancelled = gate_to(port)
        async with opened(gate) as front:
            assert b" 200 " in await front.ask(b"POST /predictions/a%7Eb/cancel" + ASKED)
            assert cancelled == ["a~b"]
            cog.knows = b"HTTP/1.1 404 Not Found"
            assert b" 404 " in await front.ask(b"POST /predictions/b/cancel" + ASKED)
            assert cancelled == ["a~b"]
            reader, writer = await front.connect()
            writer.write(b"PUT /predictions/c" + ASKED)
            await reader.readuntil(b"aa")
            assert b" 200 " in await front.ask(b"POST /predictions/c/cancel" + ASKED)
            assert cancelled == ["a~b", "c"]


@on_loop
async def test_the_server_finds_the_tenant_of_a_prediction_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cog_gate, "_ORDERED_S", 0.0)
    key = Key(name="a", sha256=sha256_of(b"ka"), weight=2.0)
    (tmp_path / "keys").write_text(key.model_dump_json(exclude_defaults=True))
    async with behind(Cog()) as port:
        gate, _ = gate_to(port, Access(None, False, Keyring(tmp_path / "keys")))
        running = gate.upstream.predictions
        async with opened(gate) as front:
            reader, writer = await front.connect()
            head = HEAD + b"authorization: Bearer ka\r\n\r\n{}"
            writer.write(b"PUT /predictions/c" + head)
            await reader.readuntil(b"aa")
            assert running["c"].tenant == key
            assert b" 200 " in await front.ask(b"PUT /predictions/whole" + head)
            await until(lambda: list(running) == ["c"])
