"""Connections of own processes: both kinds of ends, hang-ups, silence, and what is no message."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
import threading

import pytest

from cog_triton.ipc import framing
from cog_triton.ipc.connection import Connection
from cog_triton.ipc.framing import FrameError
from cog_triton.ipc.streams import Server, Stream
from cog_triton.keeper.keeper_messages import Leased, Locate

PATIENCE_S = 60


def name() -> str:
    return f"cog-triton-test-{secrets.token_hex(8)}"


async def double(stream: Stream) -> None:
    """Answer one `Locate` after the other."""
    while True:
        asked = await stream.receive()
        stream.send(Leased(str(2 * asked.owner)))


def test_a_server_answers_blocking_and_asynchronous_clients() -> None:
    def ask(where: str) -> list[Leased]:
        with Connection.to(where) as connection:
            for owner in (1, 2):
                connection.send(Locate(owner))
            return [connection.receive(PATIENCE_S) for _ in range(2)]

    async def main() -> None:
        where = name()
        server = Server(where, double)
        expected = [Leased("2"), Leased("4")]
        assert await asyncio.to_thread(ask, where) == expected
        stream = await Stream.to(where)
        stream.send(Locate(1))
        assert await stream.receive() == expected[0]
        server.close()
        await server.stop()
        with pytest.raises(EOFError):
            await stream.receive()
        with pytest.raises(ConnectionRefusedError):
            await Stream.to(where)
        stream.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_of_one_name_there_is_one_server() -> None:
    async def main() -> None:
        where = name()
        server = Server(where, double)
        with pytest.raises(OSError, match="in use"):
            Server(where, double)
        server.close()

    asyncio.run(main())


def test_silence_ends_a_receive_in_time() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    with ours, theirs:
        with pytest.raises(TimeoutError):
            ours.receive(0.01)
        theirs.send(Leased(None))
        assert ours.receive(PATIENCE_S) == Leased(None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("!I", framing.CONTROL_LIMIT + 1), "16777216 at most"),
        (framing.frame(b'{"command":"status"}\n'), "malformed"),
        (framing.frame(b'\0\0\0\x0a["No", {}]'), "'No'"),
    ],
)
def test_what_is_no_message_ends_its_connection_alone(
    content: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def send(where: str) -> None:
        with Connection.to(where) as connection:
            connection._frames.socket.sendall(content)
            with pytest.raises((EOFError, ConnectionError)):
                connection.receive(PATIENCE_S)

    async def main() -> None:
        where = name()
        server = Server(where, double)
        with caplog.at_level(logging.WARNING):
            await asyncio.to_thread(send, where)
        stream = await Stream.to(where)
        stream.send(Locate(3))
        assert await stream.receive() == Leased("6")
        stream.close()
        server.close()
        await server.stop()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert said in caplog.text
    ours, theirs = map(Connection, socket.socketpair())
    with ours, theirs:
        theirs._frames.socket.sendall(content)
        with pytest.raises(FrameError):
            ours.receive(PATIENCE_S)


def test_another_thread_ends_a_receive_by_closing() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            ours.receive()
        except (EOFError, OSError) as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ours.close()
    thread.join(PATIENCE_S)
    theirs.close()
    assert ended
