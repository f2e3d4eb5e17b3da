"""The load generator's HTTP client, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event
from typing import Any

import pytest
from scripted_server import HANG, RESET, Answer, Part, Request, serving, stream, whole

from cog_triton.bench.http_client import (
    BufferedResponse,
    Client,
    TransportError,
    encode_request,
    split_url,
)
from cog_triton.errors import InvalidArgument
from cog_triton.system.ports import free_ports


class Pieces(BufferedResponse):
    """Keeps reads apart."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[float, bytes]] = []

    def body(self, data: bytes, at: float) -> None:
        super().body(data, at)
        self.reads.append((at, data))


def talk(answer: Answer, work: Callable[[str, Client], Coroutine[Any, Any, Any]]) -> Any:
    async def main(url: str) -> Any:
        client = Client(60)
        try:
            return await work(url, client)
        finally:
            client.close()

    with serving(answer) as server:
        return asyncio.run(main(server.url)), server


def test_a_request_is_sent_and_its_answer_buffered() -> None:
    async def work(url: str, client: Client) -> BufferedResponse:
        return await client.fetch("POST", f"{url}/a?b=c", {"X-Y": "z"}, b'{"n": 1}')

    answer, server = talk([whole(b"hello", "201 Created")], work)
    assert (answer.status, answer.text) == (201, b"hello")
    assert answer.headers[b"content-type"] == b"application/json"
    (request,) = server.requests
    assert (request.path, request.json) == ("/a?b=c", {"n": 1})


async def posted(url: str, client: Client) -> Pieces:
    sink = Pieces()
    await client.send(*encode_request("POST", url, {}, b"{}"), sink)
    return sink


def test_a_stream_is_passed_on_as_it_arrives() -> None:
    sink, _ = talk(stream(b"one", b"two", b"three"), posted)
    assert sink.text == b"onetwothree"
    times = [at for at, _ in sink.reads]
    assert times == sorted(times)


def test_chunks_of_one_read_are_passed_on_together() -> None:
    sink, _ = talk([b"".join(stream(b"one", b"two", b"three"))], posted)  # type: ignore[arg-type]
    assert [data for _, data in sink.reads] == [b"onetwothree"]


def test_connections_are_reused() -> None:
    async def work(url: str, client: Client) -> int:
        for _ in range(3):
            await client.fetch("GET", url, {})
        await asyncio.gather(*(client.fetch("GET", url, {}) for _ in range(2)))
        return 0

    _, server = talk([whole(b"x")], work)
    assert len(server.requests) == 5
    assert len(server._connections) == 2


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"

    async def main() -> BufferedResponse:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + b"all of it")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            client = Client(5)
            try:
                return await client.fetch("GET", f"http://127.0.0.1:{port}", {})
            finally:
                client.close()

    assert asyncio.run(main()).text == b"all of it"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", RESET], "connection closed"),
        ([RESET], "connection closed"),
        ([b"SSH-2.0-x\r\n\r\n", HANG], "not HTTP"),
        ([HANG], "timeout"),
        (stream(b"abc", HANG), "timeout"),
    ],
)
def test_incomplete_answers_are_transport_errors(answer: Answer, kind: str) -> None:
    async def work(url: str, client: Client) -> str:
        client.timeout = 0.3
        with pytest.raises(TransportError) as caught:
            await client.fetch("GET", url, {})
        return caught.value.kind

    found, _ = talk(answer, work)
    assert found == kind


def test_a_refused_connection_is_a_transport_error() -> None:
    (port,) = free_ports(1)

    async def main() -> None:
        await Client(60).fetch("GET", f"http://127.0.0.1:{port}", {})

    with pytest.raises(TransportError, match=f"127.0.0.1:{port}") as caught:
        asyncio.run(main())
    assert caught.value.kind == "cannot connect"


def test_a_cancelled_request_closes_its_connection() -> None:
    arrived = Event()

    def answer(_: Request) -> list[Part]:
        arrived.set()
        return [HANG]

    async def work(url: str, client: Client) -> None:
        task = asyncio.create_task(client.fetch("GET", url, {}))
        assert await asyncio.to_thread(arrived.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _, server = talk(answer, work)
    assert server.requests[0].left.wait(60)


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "path", "name"),
    [
        ("http://a:1/b?c", "a", 1, False, "/b?c", "a:1"),
        ("https://api.example.com", "api.example.com", 443, True, "/", "api.example.com"),
        ("http://[::1]:80", "::1", 80, False, "/", "[::1]"),
    ],
)
def test_urls_are_split(url: str, host: str, port: int, tls: bool, path: str, name: str) -> None:
    origin, found = split_url(url)
    assert (origin.host, origin.port, origin.tls, found) == (host, port, tls, path)
    assert origin.name == name


@pytest.mark.parametrize(
    "url", ["", "localhost:5000", "ftp://a", "http://", "http://u:p@a", "http://a:x"]
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--url=.*must be http"):
        split_url(url)
