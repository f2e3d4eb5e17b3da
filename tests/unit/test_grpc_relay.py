"""gRPC relay: all bytes both ways, no faster than they are read; a port only where it may be."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cog_triton.system.ports import free_ports
from cog_triton.triton.grpc_relay import GrpcRelay

PATIENCE_S = 120
DATA = random.Random(1).randbytes(64 << 20)
HASH = hashlib.sha256(DATA).digest()
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


@asynccontextmanager
async def relayed(path: Path, serve: Serve | None) -> AsyncIterator[tuple[GrpcRelay, int]]:
    """A relay to what `serve` does at `path`, and its port; without `serve` nothing is there."""
    (port,) = free_ports(1)
    relay = GrpcRelay(port, lambda: path)
    await relay.start()
    triton = None if serve is None else await asyncio.start_unix_server(serve, path)
    try:
        yield relay, port
    finally:
        await relay.stop()
        if triton is not None:
            triton.close()


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def send(writer: asyncio.StreamWriter) -> None:
    for start in range(0, len(DATA), 1 << 20):
        writer.write(DATA[start : start + (1 << 20)])
        await writer.drain()
    writer.write_eof()


async def received(reader: asyncio.StreamReader) -> bytes:
    found = hashlib.sha256()
    while data := await reader.read(1 << 20):
        found.update(data)
    return found.digest()


def test_64_mb_pass_whole_each_way_and_a_client_that_has_sent_all_is_answered(
    tmp_path: Path,
) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await received(reader))
        await send(writer)
        writer.close()

    async def main() -> None:
        async with relayed(tmp_path / "s", serve) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await send(writer)
            assert await received(reader) == HASH
            writer.close()

    run(main())
    assert seen == [HASH]


@pytest.mark.parametrize("slow", ["client", "Triton"])
def test_who_does_not_read_is_not_sent_more(slow: str, tmp_path: Path) -> None:
    sent: list[int] = []
    may_read = asyncio.Event()
    ends: list[asyncio.Task[Any]] = []

    async def count(writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)
        for start in range(0, len(DATA), 1 << 16):
            writer.write(DATA[start : start + (1 << 16)])
            await writer.drain()
            sent.append(start)
        writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await end(reader, writer, reads=slow == "Triton")

    async def end(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, reads: bool
    ) -> None:
        if reads:
            await may_read.wait()
            assert await received(reader) == HASH
        else:
            await count(writer)
        writer.close()

    async def main() -> None:
        async with relayed(tmp_path / "s", serve) as (_, port):
            ends.append(asyncio.ensure_future(client(port)))
            idle, before = 0, 0
            while idle < 2000:  # turns of the loop in which no byte could be passed on
                await asyncio.sleep(0)
                idle = idle + 1 if sent and len(sent) == before else 0
                before = len(sent)
                assert before < len(DATA) >> 16, "all was taken, and nothing read"
            may_read.set()
            await asyncio.gather(*ends)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await end(reader, writer, reads=slow == "client")
        if slow == "Triton":
            assert await reader.read() == b""

    run(main())


def test_a_connection_ends_with_triton_and_the_next_one_is_to_its_successor(
    tmp_path: Path,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"of " + await reader.readline())
        writer.close()

    async def main() -> None:
        path = tmp_path / "first"
        (port,) = free_ports(1)
        relay = GrpcRelay(port, lambda: path)
        await relay.start()
        for path in (tmp_path / "first", tmp_path / "second"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b"", "no Triton is there"
            writer.close()
            async with await asyncio.start_unix_server(serve, path):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"{path.name}\n".encode())
                assert await reader.read() == f"of {path.name}\n".encode()
                writer.close()
        await relay.stop()
        assert not listens(port)

    run(main())
