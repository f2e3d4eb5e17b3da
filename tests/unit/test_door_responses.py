"""Responses through the front door, over sockets: passed on as they come, broken when broken."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from small_door import (
    PassGate,
    answering,
    asked,
    echo,
    on_loop,
    opened,
    read_request,
    run,
    served,
    until,
    until_end,
)

from cog_triton.door.message import Answer, Forward, Request, json_answer
from cog_triton.door.request_parser import Limits
from cog_triton.system.ports import free_ports
from cog_triton.system.process_tuning import raise_open_files

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@on_loop
async def test_events_are_passed_on_as_they_come() -> None:
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"3\r\none\r\n")
        await go_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        writer.close()

    async with served(slow) as door:
        reader, writer = await door.connect()
        writer.write(GET)
        await reader.readuntil(b"one\r\n")
        go_on.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(GET)  # the connection may be used on
        await reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "response",
    [
        CHUNKED + b"3\r\none\r\n",
        CHUNKED,
        CHUNKED + b"0\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
    ],
)
def test_a_response_that_breaks_off_does_not_look_finished(response: bytes) -> None:
    answer = asked(answering(response), GET)
    assert not answer.endswith(b"0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length" not in head or len(body) < 9


@pytest.mark.parametrize("response", [b"", b"HTTP/1.1 200 OK\r\ncontent", b"garbage\r\n\r\n"])
def test_a_server_that_ends_before_it_answers_is_a_coded_503(response: bytes) -> None:
    answer = asked(answering(response), LAST)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'{"error":"E2105 TritonUnavailable: ' in answer


def test_a_server_that_does_not_listen_is_a_coded_503() -> None:
    async def main() -> bytes:
        async with opened(PassGate(free_ports(1)[0])) as door:
            return await door.ask(GET + LAST)

    assert run(main()).count(b"E2105") == 2


def test_a_gate_that_fails_is_a_coded_500() -> None:
    class Broken(PassGate):
        async def decide(self, request: Request) -> Forward | Answer:
            raise RuntimeError("secret")

    async def main() -> bytes:
        async with opened(Broken(1)) as door:
            return await door.ask(LAST)

    answer = run(main())
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
    assert asked(answering(response), GET + LAST).count(b"HTTP/1.1 ") == 2


def test_the_answer_to_head_has_no_body() -> None:
    handler = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    answer = asked(handler, GET.replace(b"GET", b"HEAD") + LAST.replace(b"GET", b"HEAD"))
    assert answer.count(b"content-length: 5") == 2


def test_a_response_of_unknown_length_ends_with_the_connection() -> None:
    answer = asked(answering(b"HTTP/1.1 200 OK\r\n\r\nall of it"), GET)
    assert answer.endswith(b"all of it")
    assert b"connection: close" in answer


def test_bytes_beyond_the_length_are_not_passed_on() -> None:
    response = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n"
    assert asked(answering(response), LAST).endswith(b"\r\n\r\nok")


def test_a_client_that_leaves_ends_its_request_at_once() -> None:
    """The end comes of the client's leaving: none of the door's times is over before the test."""
    begun, left = asyncio.Event(), asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        begun.set()
        await reader.read()
        left.set()
        writer.close()

    async def main() -> None:
        async with served(endless, Limits(arrival_s=3600.0, idle_s=3600.0)) as door:
            _, writer = await door.connect()
            writer.write(GET)
            await begun.wait()
            await asyncio.sleep(0.1)
            writer.close()
            await left.wait()
            assert len(door.connections) == 0

    run(main())


def test_a_client_that_closes_its_half_gets_its_answer() -> None:
    async def main() -> bytes:
        async with served(echo) as door:
            reader, writer = await door.connect()
            writer.write(GET)
            writer.write_eof()
            return await until_end(reader)

    assert b"200 OK" in run(main())


def test_a_slow_reader_holds_back_the_server_not_the_doors_memory() -> None:
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

    async def main() -> int:
        async with served(flood) as door:
            reader, writer = await door.connect()
            writer.write(GET)
            await reader.readexactly(1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.5)
            held = sent
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            total = 0
            while sent < 2000 * 65536:
                total += len(await reader.read(1 << 20))
            return held

    assert run(main()) < 60 << 20


@on_loop
async def test_a_client_that_reads_nothing_is_let_go_after_a_time() -> None:
    asked = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n" + bytes(100_000_000))
        try:
            await writer.drain()
        except ConnectionError:
            writer.close()

    async with served(flood, Limits(idle_s=0.3)) as door:
        client = socket.create_connection(("127.0.0.1", door.port))
        client.sendall(GET)
        await asked.wait()
        await until(lambda: len(door.connections) == 0)
        client.close()


def test_a_short_response_may_be_replaced_whole() -> None:
    class Revising(PassGate):
        async def decide(self, request: Request) -> Forward | Answer:
            def revise(status: int, body: bytes) -> Answer | None:
                return json_answer(503, "other") if body == b"bad" else None

            return Forward(self.connections, self.port, "GET", b"/", [], b"", revise=revise)

    async def main(body: bytes) -> bytes:
        handler = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n" + body)
        async with served(handler) as plain, opened(Revising(plain.gate.port)) as door:
            return await door.ask(LAST)

    assert b" 200 OK" in run(main(b"ok!"))
    answer = run(main(b"bad"))
    assert b" 503 " in answer
    assert answer.endswith(b'"other"')
    assert run(main(b"ok!more")).endswith(b"\r\n\r\nok!")
    assert b" 503 " in run(main(b"xx"))  # shorter than it says: broken, and nothing was written


def test_a_chunked_response_may_be_replaced_whole() -> None:
    class Revising(PassGate):
        async def decide(self, request: Request) -> Forward | Answer:
            def revise(status: int, body: bytes) -> Answer | None:
                return json_answer(400, "other") if body == b"ba0\r\n\r\nd" else None

            return Forward(self.connections, self.port, "GET", b"/", [], b"", revise=revise)

    async def main(*pieces: bytes, kind: bytes = b"application/json") -> bytes:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % kind)
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            for piece in pieces:
                await asyncio.sleep(0.02)
                writer.write(piece)
            writer.close()

        async with served(handler) as plain, opened(Revising(plain.gate.port)) as door:
            return await door.ask(LAST)

    bad = (b"2\r\nba\r\n", b"6\r\n0\r\n\r\n", b"d\r\n", b"0\r\n\r\n")
    answer = run(main(*bad))
    assert b" 400 " in answer
    assert answer.endswith(b'"other"')
    assert run(main(b"2\r\nok\r\n", b"0\r\n\r\n")).endswith(b"\r\n\r\n2\r\nok\r\n0\r\n\r\n")
    assert run(main(*bad, kind=b"text/event-stream")).endswith(b"".join(bad))
    long = b"50000\r\n%b\r\n" % (b"a" * 0x50000)
    assert run(main(long, b"0\r\n\r\n")).endswith(long + b"0\r\n\r\n")
    assert b" 503 " in run(main(*bad[:-1]))  # broken off, and nothing was written


@on_loop
async def test_requests_that_arrive_slowly_do_not_keep_others_out() -> None:
    async with served(echo, Limits(connections=20)) as door:
        for _ in range(30):
            _, writer = await door.connect()
            writer.write(b"GET / HT")
        await asyncio.sleep(0.1)
        assert b"200 OK" in await door.ask(LAST)


@on_loop
async def test_the_connection_that_is_idle_the_longest_makes_room() -> None:
    async with served(echo, Limits(connections=3)) as door:
        clients = [await door.connect() for _ in range(3)]
        await until(lambda: len(door.connections) == 3)
        clients[0][1].write(GET)  # so it is not the longest
        await clients[0][0].readuntil(b"\r\n\r\n")
        assert b"200 OK" in await door.ask(LAST)
        assert await clients[1][0].read() == b""
        clients[0][1].write(GET)
        await clients[0][0].readuntil(b"200 OK")


def test_beyond_the_limit_of_busy_connections_there_is_a_coded_503() -> None:
    asked = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await read_request(reader)
        asked += 1
        await reader.read()
        writer.close()

    async def main() -> bytes:
        async with served(silent, Limits(connections=2)) as door:
            for _ in range(2):
                _, writer = await door.connect()
                writer.write(GET)
            await until(lambda: asked == 2)
            return await door.ask(GET)

    answer = run(main())
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"E2107" in answer


@on_loop
async def test_a_thousand_idle_connections_leave_room_for_one_that_asks() -> None:
    async with served(echo, Limits(connections=100)) as door:
        idle = []
        for _ in range(400):
            idle.append(socket.create_connection(("127.0.0.1", door.port)))
            await asyncio.sleep(0)
        assert b"200 OK" in await door.ask(LAST)
        assert len(door.connections) <= 100
        for client in idle:
            client.close()


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
    async with served(echo) as door:
        assert b"200 OK" in await door.ask(LAST)
        client, files = socket.socket(), []
        with suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        client.connect(("127.0.0.1", door.port))
        await until(lambda: "E2107" in caplog.text)
        for file in files:
            os.close(file)
        client.sendall(LAST)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        assert b"200 OK" in await loop.sock_recv(client, 65536)
        client.close()
    assert "no connection can be accepted: Too many open files" in caplog.text


def test_the_soft_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_open_files() == min(hard, 65536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
