"""Requests at the front: what is parsed, refused, written anew; and who may listen."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import replace
from typing import Any

import pytest
import small_front
from small_front import PassGate, Wire, echo, on_loop, run, served, until, until_end

from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.front.message import Answer, Forward, Limits, Refused, Request

GET = b"GET /a?b=c HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
SMALL = Limits(body_bytes=1000, header_bytes=2000)
BRIEF = replace(SMALL, arrival_s=0.3, idle_s=0.3)


def asked(*pieces: bytes, limits: Limits = SMALL) -> bytes:
    """What the front answers; requests that pass are echoed."""
    return small_front.asked(echo, *pieces, limits=limits)


def test_a_request_is_written_anew() -> None:
    answer = asked(b"POST /a?b=c HTTP/1.1\r\nHost: h\r\nX:  y \r\nConnection: close, x-hop\r\n"
                   b"X-Hop: 1\r\nContent-Length: 3\r\n\r\nabc")  # fmt: skip
    _, _, body = answer.partition(b"\r\n\r\n")
    assert body == (
        b"POST /a?b=c HTTP/1.1\r\nhost: h\r\nx: y\r\ncontent-length: 3\r\nconnection: close"
        b"\r\n\r\nabc"
    )


# As the HttpClient of Java 11 and later sends it without TLS.
JAVA = (
    b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: 13\r\nHost: 127.0.0.1:8080\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAA\r\n"
    b"Upgrade: h2c\r\nUser-Agent: Java-http-client/17.0.9\r\nContent-Type: application/json\r\n\r\n"
    b'{"a": "b\\n"}\n'
)
JAVA_CHUNKED = JAVA.replace(b"Content-Length: 13", b"Transfer-encoding: chunked").replace(
    b'{"a": "b\\n"}\n', b'd\r\n{"a": "b\\n"}\n\r\n0\r\n\r\n'
)
WEBSOCKET = (
    b"GET /a HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: keep-alive, Upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


@pytest.mark.parametrize("upgrade", [JAVA, JAVA_CHUNKED, WEBSOCKET])
@on_loop
async def test_a_request_that_offers_another_protocol_may_be_split_anywhere(upgrade: bytes) -> None:
    class Here(PassGate):
        async def decide(self, request: Request) -> Answer:  # type: ignore[override]
            self.seen.append(replace(request, take_bytes=all))
            return Answer(200, b"")

    async def requests(*pieces: bytes) -> list[Request]:
        gate = Here()
        wire = Wire(gate, SMALL)
        wire.feed(*pieces)
        await until(lambda: wire.written.count(b" 200 ") == 3)
        assert wire.protocol.is_idle
        wire.close()
        return gate.seen

    sent = upgrade + GET + upgrade
    whole = await requests(sent)
    body = b"" if upgrade is WEBSOCKET else b'{"a": "b\\n"}\n'
    assert [one.body for one in whole] == [body, b"", body]
    assert [one.method for one in whole] == [upgrade.split()[0].decode(), "GET", whole[0].method]
    for place in range(1, len(sent), 7):
        assert await requests(sent[:place], sent[place:]) == whole
    assert await requests(*(sent[i : i + 1] for i in range(len(sent)))) == whole


@pytest.mark.parametrize(
    "name",
    ["content-type", "host", "authorization", "content-encoding", "accept", "prefer", "origin"],
)
def test_what_a_gate_decides_on_is_what_is_passed_on(name: str) -> None:
    """Whatever Connection lists; of private headers it may take some away."""
    head = (
        f"POST / HTTP/1.1\r\nx-a: 1\r\n{name}: kept\r\nconnection: close, {name.upper()}, X-A\r\n"
    )
    answer = asked(head.encode() + b"content-length: 0\r\n\r\n")
    assert f"{name}: kept".encode() in answer
    assert b"x-a" not in answer


@pytest.mark.parametrize("begun", [b"GET /", POST + b"content-length: 999\r\n\r\n"])
@on_loop
async def test_a_request_that_arrives_too_slowly_is_ended_with_408(begun: bytes) -> None:
    async with served(echo, BRIEF) as front:
        reader, writer = await front.connect()
        answer = asyncio.ensure_future(until_end(reader))
        writer.write(begun)
        while not answer.done():  # a byte now and then does not win time
            writer.write(b"a")
            await asyncio.sleep(0.05)
        assert b"408 Request Timeout" in await answer


@on_loop
async def test_what_is_refused_amid_an_answer_is_not_taken_for_the_answer() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await small_front.read_request(reader)
        begun.set()
        await reader.read()
        left.set()

    async with served(endless) as front:
        reader, writer = await front.connect()
        writer.write(GET)
        await begun.wait()
        writer.write(b"GARBAGE\r\n\r\n")
        assert await until_end(reader) == b""
        await left.wait()


@on_loop
async def test_the_body_of_a_client_that_has_left_counts_until_its_work_has_ended() -> None:
    release = asyncio.Event()

    class Working(PassGate):
        async def decide(self, request: Request) -> Answer:  # type: ignore[override]
            self.seen.append(request)
            await release.wait()
            return Answer(200, b"")

    async with small_front.opened(Working(), SMALL) as front:
        free = front.connections._free_bytes
        _, writer = await front.connect()
        writer.write(POST + b"content-length: 900\r\n\r\n" + b"a" * 900)
        await until(lambda: bool(front.gate.seen))
        resets = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.get_extra_info("socket").setsockopt(*resets)
        writer.transport.abort()
        await until(lambda: len(front.connections) == 0)
        assert front.connections._free_bytes == free - 900
        release.set()
        await until(lambda: front.connections._free_bytes == free)


def test_endless_chunk_extensions_are_refused() -> None:
    assert b" 413 " in asked(POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 4_000_000)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/messages", "request_too_large"), ("/v1/chat/completions", "invalid_request_error")],
)
@on_loop
async def test_what_the_parser_refuses_has_the_shape_of_its_path(path: str, kind: str) -> None:
    async with small_front.opened(small_front.gates()["openai"], SMALL) as front:
        asked = f"POST {path}?beta=true HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n"
        answer, _, body = (await front.ask(asked.encode())).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert json.loads(body)["error"]["type"] == kind


class Refusing(PassGate):
    """Lets nothing pass."""

    async def decide(self, request: Request) -> Forward:
        raise self.changed["refused"]


DOWN = Refused(503, TritonUnavailable("later"))
WRONG = Refused(400, InvalidArgument("a='xyzzy': must be a number"), "team")


@pytest.mark.parametrize(
    ("refused", "asked", "logged"),
    [
        (WRONG, b"GET /v1/models HTTP/1.1", [("other", "E1005")]),
        (WRONG, b"POST /v2/models/m/infer HTTP/1.1", [("triton", "E1005")]),
        (DOWN, b"POST /predictions HTTP/1.1", [("predictions", "E2105")]),
        (DOWN, b"GET /v2/health/ready HTTP/1.1", []),  # a probe, of which there are many
        (DOWN, b"no HTTP", [("other", "E1005")]),
    ],
)
def test_what_is_refused_is_logged(
    refused: Refused, asked: bytes, logged: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> bytes:
        async with small_front.opened(Refusing(1, {"refused": refused})) as front:
            return await front.ask(asked + b"\r\nconnection: close\r\n\r\n")

    with caplog.at_level("INFO", "cog_triton"):
        assert b"HTTP/1.1 " in run(main())
    events = [record.__dict__["values"] for record in caplog.records if record.msg == "refused"]
    assert [(event["endpoint"], event["code"]) for event in events] == logged
    if refused is WRONG:
        said = {"tenant": "team", "field": "a", "reason": "must be a number"}
        assert events[0].items() >= said.items()
