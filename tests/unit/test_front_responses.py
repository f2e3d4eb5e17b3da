"""Responses through the front, over sockets: passed on as they come, broken when broken."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from small_front import (
    PassGate,
    Wire,
    answering,
    asked,
    echo,
    on_loop,
    opened,
    read_request,
    served,
    until,
    until_end,
)

from cog_triton.front.cog_gate import CodedEnd
from cog_triton.front.message import Answer, Forward, Limits, Request, json_answer
from cog_triton.system.ports import free_ports

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("response", [b"", b"HTTP/1.1 200 OK\r\ncontent", b"garbage\r\n\r\n"])
def test_a_server_that_ends_before_it_answers_is_a_coded_503(response: bytes) -> None:
    answer = asked(answering(response), LAST)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'{"error":"E2105 TritonUnavailable: ' in answer


@on_loop
async def test_a_gate_that_fails_is_a_coded_500() -> None:
    class Broken(PassGate):
        async def decide(self, request: Request) -> Forward:
            raise RuntimeError("secret")

    async with opened(Broken()) as front:
        answer = await front.ask(LAST)
    assert b" 500 " in answer
    assert b"E2100" in answer
    assert b"secret" not in answer


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    ],
)
def test_responses_without_a_body_leave_the_connection_usable(response: bytes) -> None:
    answer = asked(answering(response), GET + LAST)
    status = response.rpartition(b"HTTP/1.1 ")[2][:3]
    assert [each[:3] for each in answer.split(b"HTTP/1.1 ")[1:]] == [status] * 2
    assert b"a: b" not in answer


@pytest.mark.parametrize("begins", [b"", CHUNKED])
@on_loop
async def test_a_client_that_leaves_ends_its_request_at_once(
    begins: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The end comes of the client's leaving: none of the front's times is over before the test."""
    ended: list[bool] = []
    begun, left = asyncio.Event(), asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(begins)
        begun.set()
        await reader.read()
        left.set()
        writer.close()

    caplog.set_level("INFO", "cog_triton")
    slow = Limits(arrival_s=3600.0, idle_s=3600.0)
    async with served(endless, slow, ended=ended.append) as front:
        reader, writer = await front.connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        await begun.wait()
        await (reader.readuntil(b"\r\n\r\n") if begins else asyncio.sleep(0.1))
        writer.close()
        await left.wait()
        assert len(front.connections) == 0
    assert ended == [False]
    assert caplog.records == []  # nothing was refused, and nothing has failed


@on_loop
async def test_a_client_that_closes_its_half_gets_its_answers() -> None:
    async with served(echo, Limits(idle_s=3600.0)) as front:
        reader, writer = await front.connect()
        writer.write(GET + GET)
        writer.write_eof()
        assert (await until_end(reader)).count(b"200 OK") == 2


@on_loop
async def test_a_slow_reader_holds_back_the_server_not_the_doors_memory() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(CHUNKED)
        for _ in range(2000):
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            await writer.drain()
            sent += 65536
        writer.write(b"0\r\n\r\n")
        writer.close()

    async with served(flood) as front:
        reader, writer = await front.connect()
        writer.write(GET)
        await reader.readexactly(1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        assert sent < 60 << 20
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        while sent < 2000 * 65536:
            await reader.read(1 << 20)


@pytest.mark.parametrize("sent", [GET, LAST])
@on_loop
async def test_the_rest_of_an_answer_that_is_not_read_is_dropped_after_a_time(sent: bytes) -> None:
    """One that is too small to pause the writing."""
    wire = Wire(PassGate(free_ports(1)[0]), Limits(idle_s=0.1))
    wire.unread = 100
    wire.feed(sent)
    await until(lambda: wire.lost)
    assert wire.written


def revise(status: int, body: bytes) -> Answer | None:
    return json_answer(400, "other") if body.startswith(b"bad") else None


def test_a_short_response_may_be_replaced_whole() -> None:
    def through(body: bytes, size: int = 3) -> bytes:
        handler = answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + body)
        return asked(handler, LAST, revise=revise)

    assert b" 200 OK" in through(b"ok!")
    answer = through(b"bad")
    assert b" 400 " in answer
    assert answer.endswith(b'"other"')
    assert b" 503 " in through(b"xx")  # shorter than it says: broken, and nothing was written
    assert through(b"bad" + b"a" * 2097149, 2097152).endswith(b"a" * 2097149)


@pytest.mark.parametrize(("status", "hidden"), [(200, False), (400, True), (503, True)])
def test_errors_are_redacted_and_nothing_else(status: int, hidden: bool) -> None:
    handler = answering(b"HTTP/1.1 %d A\r\ncontent-length: 6\r\n\r\nsecret" % status)
    answer = asked(handler, LAST, redact=lambda piece: b"*" * len(piece))
    assert answer.endswith(b"*" * 6 if hidden else b"secret")


@pytest.mark.parametrize(
    ("response", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", True),
        (b"HTTP/1.1 200 OK\r\n\r\nok", True),
        (CHUNKED + b"0\r\n\r\n", True),
        (CHUNKED + b"3\r\none\r\n", False),
        (CHUNKED, False),
        (CHUNKED + b"0\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", False),
    ],
)
def test_a_response_that_breaks_off_does_not_look_finished(response: bytes, whole: bool) -> None:
    ended: list[bool] = []
    head, _, body = asked(answering(response), LAST, ended=ended.append).partition(b"\r\n\r\n")
    assert ended == [whole]
    assert body.endswith(b"ok" if b"content-length: 2" in head else b"0\r\n\r\n") is whole
    assert b"content-length: 9" not in head or len(body) < 9


@on_loop
async def test_an_answer_that_is_being_read_makes_no_room_for_others() -> None:
    class Large(PassGate):
        async def decide(self, request: Request) -> Answer:  # type: ignore[override]
            return Answer(200, bytes(32 << 20))

    async with opened(Large(), Limits(connections=2)) as front:
        reader, writer = await front.connect()
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: not front.connections.answering)
        idle, _ = await front.connect()
        await until(lambda: len(front.connections) == 2)
        await front.connect()
        assert await until_end(idle) == b""
        assert len(await reader.readexactly(32 << 20)) == 32 << 20


@on_loop
async def test_beyond_the_limit_of_busy_connections_there_is_a_coded_503() -> None:
    asked = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await read_request(reader)
        asked += 1
        await reader.read()
        writer.close()

    async with served(silent, Limits(connections=2)) as front:
        for _ in range(2):
            _, writer = await front.connect()
            writer.write(GET)
        await until(lambda: asked == 2)
        answer = await front.ask(GET)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"E2107" in answer


@pytest.fixture
def few_files() -> Iterator[None]:
    """A process whose descriptors can be used up soon."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
@on_loop
async def test_a_lack_of_descriptors_is_told_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    async with served(echo) as front:
        assert b"200 OK" in await front.ask(LAST)
        client, files = socket.socket(), []
        with suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        client.connect(("127.0.0.1", front.port))
        await until(lambda: "E2107" in caplog.text)
        for file in files:
            os.close(file)
        client.close()
        assert b"200 OK" in await front.ask(LAST)
    assert "no connection can be accepted: Too many open files" in caplog.text


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CUT = b'data: {"error":"E2105"}\n\n'


def chunk(event: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(event), event)


EVENT = b'event: output\ndata: {"chunk":" the","index":82}\n\n'
TOKEN = chunk(EVENT)


def failed(reason: str, output: str = "") -> bytes:
    """What coglet ends a failed prediction's stream with."""
    data = {"error": reason, "id": "x", "output": [output], "status": "failed"}
    return f"event: completed\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def dechunked(data: bytes) -> tuple[bytes, bool]:
    """The body, and whether it came to its end."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if size == b"0":
            return body, data == b"\r\n"
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body, False


def edited(*pieces: bytes) -> bytes:
    edit = CodedEnd()
    return b"".join(map(edit, pieces)) + edit.end()


CODE = 'E1002 PromptTooLong: "no"'
DEATHS = ("Worker crashed", "Failed to send request: Broken pipe (32)")
FIRST = ("", "Generator iteration error: A: ", "Async prediction failed: A: ")


@pytest.mark.parametrize(
    ("reason", "seen"),
    [
        *((f"Prediction failed: {words}{CODE}", CODE) for words in FIRST),
        *((d, f"E2105 TritonUnavailable: Cog's worker has died: {d}; try again") for d in DEATHS),
        *((as_it_is, as_it_is) for as_it_is in (CODE, "Worker", "Prediction failed: A: b")),
    ],
)
@pytest.mark.parametrize("output", ["", "x" * 100_000])
def test_a_failure_begins_with_its_code_wherever_reads_cut_the_stream(
    reason: str, seen: str, output: str
) -> None:
    data, expected = EVENT * 3 + failed(reason, output), EVENT * 3 + failed(seen, output)
    for at in (*range(len(EVENT) * 2, len(EVENT) * 3 + 300), len(data) - 1):
        assert edited(data[:at], data[at:]) == expected
    assert edited(*(data[i : i + 1] for i in range(len(data)))) == expected


def through(*pieces: bytes) -> bytes:
    """What a client gets when these come, one after the other, and then the end."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        writer.close()

    return asked(handler, LAST, edit=CodedEnd(), cut=CUT).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "pieces",
    [[HEAD + TOKEN], [HEAD, TOKEN], [HEAD], [HEAD + TOKEN, TOKEN[:20]], [HEAD, TOKEN + b"2"]],
)
def test_a_stream_that_breaks_off_ends_with_an_error(pieces: list[bytes]) -> None:
    body, whole = dechunked(through(*pieces))
    assert whole
    assert body.endswith(CUT)
    assert body.count(b"the") == sum(piece.count(TOKEN) for piece in pieces)
