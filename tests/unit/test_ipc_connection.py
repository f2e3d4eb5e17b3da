"""Connections of own processes: both kinds of ends, hang-ups, silence, and what is no message."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from cog_triton.engines.engine_orders import Opened, Serve, Stop
from cog_triton.ipc import framing
from cog_triton.ipc.connection import Connection
from cog_triton.ipc.framing import FrameError
from cog_triton.ipc.streams import Stream

PATIENCE_S = 60
Pair = tuple[Connection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    own, other = socket.socketpair()
    connection = Connection(own)
    yield connection, other
    connection.close()
    other.close()


def test_a_connection_and_a_stream_understand_each_other(pair: Pair) -> None:
    connection, other = pair

    async def main() -> None:
        stream = await Stream.of(other)
        for sent in (Serve("address", 2), Stop()):
            stream.send(sent)
            assert connection.receive(PATIENCE_S) == sent
            connection.send(Opened())
            assert await stream.receive() == Opened()
        connection.close()
        with pytest.raises(EOFError):
            await stream.receive()
        stream.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_silence_ends_a_receive_in_time(pair: Pair) -> None:
    connection, other = pair
    with pytest.raises(TimeoutError):
        connection.receive(0.01)
    other.close()
    with pytest.raises(EOFError):
        connection.receive(PATIENCE_S)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("!I", framing.CONTROL_LIMIT + 1), "16777216 at most"),
        (framing.frame(b'{"command":"status"}\n'), "malformed"),
        (framing.frame(b'\0\0\0\x0a["No", {}]'), "'No'"),
    ],
)
def test_what_is_no_message_is_an_error(pair: Pair, content: bytes, said: str) -> None:
    connection, other = pair
    other.sendall(content)
    with pytest.raises(FrameError, match=said):
        connection.receive(PATIENCE_S)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            stream = await Stream.of(ours)
            theirs.sendall(content)
            with pytest.raises(FrameError, match=said):
                await stream.receive()
            stream.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_another_thread_ends_a_receive_by_closing(pair: Pair) -> None:
    connection, _ = pair
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            connection.receive()
        except (EOFError, OSError) as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    connection.close()
    thread.join(PATIENCE_S)
    assert ended
