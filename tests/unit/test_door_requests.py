"""Requests at the door: what is parsed, refused, written anew; and who may listen."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from dataclasses import replace

import pytest
import small_door
from small_door import answering, echo, on_loop, run, served, until, until_end

from cog_triton.door.client_connection import Listener
from cog_triton.door.message import Answer, Forward, Refused, Request
from cog_triton.door.request_parser import Limits, RequestParser
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnavailable
from cog_triton.system.ports import bind

GET = b"GET /a?b=c HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
SMALL = Limits(body_bytes=1000, header_bytes=2000)
BRIEF = replace(SMALL, arrival_s=0.3, idle_s=0.3)


def chunked(*chunks: bytes, ending: bytes = b"0\r\n\r\n") -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + body + ending


def asked(*pieces: bytes, limits: Limits = SMALL) -> bytes:
    """What the door answers; requests that pass are echoed."""
    return small_door.asked(echo, *pieces, limits=limits)


def test_a_request_is_written_anew() -> None:
    answer = asked(b"POST /a?b=c HTTP/1.1\r\nHost: h\r\nX:  y \r\nConnection: close, x-hop\r\n"
                   b"X-Hop: 1\r\nContent-Length: 3\r\n\r\nabc")  # fmt: skip
    _, _, body = answer.partition(b"\r\n\r\n")
    assert body == (
        b"POST /a?b=c HTTP/1.1\r\nhost: h\r\nx: y\r\ncontent-length: 3\r\nconnection: close"
        b"\r\n\r\nabc"
    )


@on_loop
async def test_a_connection_takes_one_request_after_the_other() -> None:
    async with served(echo) as door:
        reader, writer = await door.connect()
        for _ in range(3):
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /a?b=c")
        writer.close()


def test_pipelined_requests_are_answered_in_order() -> None:
    requests = [b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(9)]
    answer = asked(b"".join(requests) + LAST)
    assert answer.count(b"200 OK") == 10
    places = [answer.find(b"GET /%d " % number) for number in range(9)]
    assert places == sorted(places)
    assert -1 not in places


def test_too_many_pipelined_requests_are_refused() -> None:
    assert b" 400 " in asked(GET * 500) or asked(GET * 500).count(b" 200 ") < 100


def test_chunks_arrive_as_one_body_of_known_length() -> None:
    answer = asked(chunked(b"ab", b"c", ending=b"0\r\nX-Trailer: 1\r\nhost: evil\r\n\r\n"))
    assert answer.endswith(b"content-length: 3\r\nconnection: close\r\n\r\nabc")
    assert b"railer" not in answer
    assert b"evil" not in answer


def test_a_million_chunks_of_one_byte_are_one_body() -> None:
    began = time.process_time()
    sent = chunked()[:-5] + b"1\r\na\r\n" * 1_000_000 + b"0\r\n\r\n"
    answer = asked(sent, limits=Limits())
    assert answer.endswith(b"a" * 1000)
    assert b"content-length: 1000000\r\n" in answer
    assert time.process_time() - began < 60


def test_endless_chunk_extensions_are_refused() -> None:
    assert b" 413 " in asked(chunked()[:-5] + b"1;" + b"a" * 4_000_000)


@pytest.mark.parametrize(
    "request_",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        POST + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        POST + b"content-length: 3, 3\r\n\r\nabc",
        POST + b"content-length: +3\r\n\r\nabc",
        POST + b"content-length: -3\r\n\r\nabc",
        POST + b"content-length: 99999999999999999999999\r\n\r\n",
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n" + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
        b"GET http://other/ HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT other:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        chunked(ending=b"zz\r\n"),
        chunked(ending=b"-1\r\n"),
        chunked(ending=b"1\r\nab\r\n"),
        chunked(ending=b"ffffffffffffffffff\r\n"),
    ],
)  # fmt: skip
def test_what_two_parsers_could_read_differently_is_refused(request_: bytes) -> None:
    answer = asked(request_)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"E1005" in answer


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
def test_another_protocol_that_is_offered_is_not_taken(upgrade: bytes) -> None:
    answer = asked(upgrade, upgrade + upgrade, LAST)
    assert answer.count(b"200 OK") == 4
    assert answer.count(b'\r\n\r\n{"a": "b\\n"}\n') == (0 if upgrade is WEBSOCKET else 3)
    for word in (b"h2c", b"websocket\r", b"http2-settings", b"upgrade", b"chunked"):
        assert word not in answer.lower()


@pytest.mark.parametrize("upgrade", [JAVA, JAVA_CHUNKED, WEBSOCKET])
def test_a_request_that_offers_another_protocol_may_be_split_anywhere(upgrade: bytes) -> None:
    def requests(*pieces: bytes) -> list[Request]:
        parser = RequestParser(SMALL, "", lambda count: True)
        for piece in pieces:
            parser.feed(piece)
        assert parser.is_between_requests
        return list(parser.complete)

    sent = upgrade + GET + upgrade
    whole = requests(sent)
    body = b"" if upgrade is WEBSOCKET else b'{"a": "b\\n"}\n'
    assert [one.body for one in whole] == [body, b"", body]
    assert [one.method for one in whole] == [upgrade.split()[0].decode(), "GET", whole[0].method]
    for place in range(1, len(sent)):
        assert requests(sent[:place], sent[place:]) == whole
    assert requests(*(sent[i : i + 1] for i in range(len(sent)))) == whole


def test_no_upgrade_makes_two_parsers_read_differently() -> None:
    for bad in (
        JAVA.replace(b"Content-Length: 13", b"Content-Length: 13\r\nTransfer-Encoding: chunked"),
        JAVA.replace(b"Content-Length: 13", b"Content-Length: 13\r\nContent-Length: 3"),
        JAVA_CHUNKED.replace(b"\r\n0\r\n", b"\r\nx\r\n"),
        JAVA.replace(b"POST /v1/chat/completions", b"CONNECT 127.0.0.1:22"),
    ):
        answer = asked(bad, LAST)
        assert b"HTTP/1.1 400 " in answer
        assert b"200 OK" not in answer
    too_long = JAVA.replace(b"Content-Length: 13", b"Content-Length: 1001")
    assert b"HTTP/1.1 413 " in asked(too_long)


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


def test_headers_are_fewer_than_coglet_takes() -> None:
    def sent(count: int) -> bytes:
        headers = b"".join(b"a%d: b\r\n" % i for i in range(count - 2))
        return asked(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + headers + b"\r\n")

    assert b"200 OK" in sent(96)
    assert b"431 " in sent(97)
    assert b"E1008 RequestTooLarge: headers: more than 96" in sent(97)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", b"413"),
        (chunked(b"a" * 600, b"b" * 600), b"413"),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 3000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 30_000_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 3000, b"431"),
        (b"A" * 5000, b"400"),
    ],
)
def test_what_is_too_large_is_refused_while_it_arrives(request_: bytes, status: bytes) -> None:
    answer = asked(request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "begun",
    [b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n", chunked(b"a")[:-6],
     b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab"],
)  # fmt: skip
def test_a_request_that_arrives_too_slowly_is_ended_with_408(begun: bytes) -> None:
    async def main() -> bytes:
        async with served(echo, BRIEF) as door:
            reader, writer = await door.connect()
            answer = asyncio.ensure_future(until_end(reader))
            for byte in begun:  # a byte now and then does not win time
                if answer.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.03 if len(begun) < 12 else 0.005)
            return await answer

    assert b"408 Request Timeout" in run(main())


@on_loop
async def test_connections_that_ask_for_nothing_are_closed() -> None:
    async with served(echo, BRIEF) as door:
        reader, writer = await door.connect()
        assert await until_end(reader) == b""
        answer = b""
        while not answer:  # the door closes a connection whose request is late
            reader, writer = await door.connect()
            writer.write(GET)
            answer = await until_end(reader)
        assert b"200 OK" in answer
        assert len(door.connections) == 0


@on_loop
async def test_a_client_that_asks_for_leave_to_send_gets_it() -> None:
    async with served(echo) as door:
        reader, writer = await door.connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n")
        writer.write(b"content-length: 3\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert b"expect" not in await reader.readuntil(b"abc")


def test_leave_to_send_is_not_given_for_too_much() -> None:
    answer = asked(POST + b"expect: 100-continue\r\ncontent-length: 1001\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


def test_http_1_0_is_passed_on_as_such() -> None:
    answer = asked(b"GET / HTTP/1.0\r\n\r\n")
    assert b"GET / HTTP/1.0\r\n" in answer
    assert b"connection: close" in answer


@on_loop
async def test_bodies_of_all_connections_together_are_bounded() -> None:
    limits = Limits(body_bytes=100)

    async with served(echo, limits) as door:
        held = []
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        for _ in range(limits.all_bodies_bytes // 100):
            _, writer = await door.connect()
            writer.write(head + b"a" * 99)
            held.append(writer)
        await until(lambda: len(door.connections) == len(held))
        await until(lambda: door.connections._free_bytes < 100)
        assert b"503" in await door.ask(head + b"a" * 100)
        for writer in held:
            writer.close()
        await until(lambda: len(door.connections) == 0)
        last = head.replace(b"host", b"connection: close\r\nhost")
        assert b"200 OK" in await door.ask(last + b"a" * 100)


@on_loop
async def test_bodies_are_counted_no_more_once_answered() -> None:
    limits = Limits(body_bytes=100)
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b"a" * 100

    handler = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    async with served(handler, limits) as door:
        decide = door.gate.decide

        async def decompressed(request: Request) -> Forward | Answer:
            assert request.take_bytes(1000)
            assert not request.take_bytes(1000)
            return await decide(request)

        door.gate.decide = decompressed
        reader, writer = await door.connect()
        for _ in range(3 * limits.all_bodies_bytes // 100):
            writer.write(request)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


@on_loop
async def test_clients_of_a_burst_are_accepted_in_several_turns() -> None:
    loop = asyncio.get_running_loop()
    listening = bind("PORT", "127.0.0.1", 0, 64)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(50)]
    turn, accepted = 0, list[int]()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if len(accepted) < len(clients):
            loop.call_soon(count_turns)

    class Accepted(asyncio.Protocol):
        def __init__(self) -> None:
            accepted.append(turn)

    count_turns()
    listener = Listener(listening, Accepted)
    try:
        await until(lambda: len(accepted) == len(clients))
    finally:
        listener.close()
        for client in clients:
            client.close()
    assert max(Counter(accepted).values()) <= 16


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/messages", "request_too_large"),
        ("/v1/messages/count_tokens?beta=true", "request_too_large"),
        ("/v1/chat/completions", "invalid_request_error"),
    ],
)
@on_loop
async def test_what_the_parser_refuses_has_the_shape_of_its_path(path: str, kind: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode()
    limits = {b"413": head + b"content-length: 1001\r\n\r\n", b"431": head + b"a: b\r\n" * 3000}
    for status, sent in limits.items():
        async with small_door.opened(small_door.gates()["openai"], SMALL) as door:
            answer, _, body = (await door.ask(sent)).partition(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)
        error = json.loads(body)["error"]
        assert error["type"] == (kind if status == b"413" else "invalid_request_error")
        assert ("param" in error) is ("messages" not in path)
        assert error["message"].startswith("E1008")
        assert b"x-error-code: E1008" in answer


class Refusing:
    """A gate that lets nothing pass."""

    def __init__(self, refused: Refused) -> None:
        self._refused = refused

    async def decide(self, request: Request) -> Answer:
        raise self._refused

    def refusal(self, status: int, error: CogTritonError, path: str = "") -> Answer:
        return Answer(status, str(error).encode())


DOWN = Refused(503, TritonUnavailable("later"))
WRONG = Refused(400, InvalidArgument("a='xyzzy': must be a number"), "team")


@pytest.mark.parametrize(
    ("refused", "sent", "logged"),
    [
        (WRONG, b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n", ("other", "E1005")),
        (
            WRONG,
            b"POST /v2/models/m/infer HTTP/1.1\r\nconnection: close\r\n\r\n",
            ("triton", "E1005"),
        ),
        (
            DOWN,
            b"POST /predictions HTTP/1.1\r\nconnection: close\r\n\r\n",
            ("predictions", "E2105"),
        ),
        (
            DOWN,
            b"GET /v2/health/ready HTTP/1.1\r\nconnection: close\r\n\r\n",
            None,
        ),  # a probe, of which there are many
        (DOWN, b"no HTTP\r\n\r\n", ("other", "E1005")),
    ],
)
def test_what_is_refused_is_logged(
    refused: Refused,
    sent: bytes,
    logged: tuple[str, str] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> bytes:
        async with small_door.opened(Refusing(refused)) as door:
            return await door.ask(sent)

    with caplog.at_level("INFO", "cog_triton"):
        assert b"HTTP/1.1 " in run(main())
    events = [record.__dict__["values"] for record in caplog.records if record.msg == "refused"]
    assert [(event["endpoint"], event["code"]) for event in events] == ([logged] if logged else [])
    if refused is WRONG:
        assert events[0].items() >= {"tenant": "team", "field": "a"}.items()
        assert events[0]["reason"] == "must be a number"
