"""Connections of own processes in asyncio: hang-ups, and what is no message."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from cog_triton.engines.engine_orders import Opened, Serve, Stop
from cog_triton.ipc import framing
from cog_triton.ipc.framing import FrameError
from cog_triton.ipc.messages import Stream

PATIENCE_S = 60


def test_two_streams_understand_each_other_until_one_hangs_up() -> None:
    async def main() -> None:
        ours, theirs = [await Stream.of(own) for own in socket.socketpair()]
        for sent in (Serve("address", 2), Stop()):
            ours.send(sent)
            assert await theirs.receive() == sent
        theirs.send(Opened())
        theirs.close()
        assert await ours.receive() == Opened()
        with pytest.raises(EOFError):
            await ours.receive()
        ours.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("!I", framing.CONTROL_LIMIT + 1), "16777216 at most"),
        (framing.frame(b'{"command":"status"}\n'), "malformed"),
        (framing.frame(b'{"type": "No"}'), "'No'"),
        (framing.frame(b'{"type": "Serve", "address": 1, "generation": 1}'), "Expected `str`"),
    ],
)
def test_what_is_no_message_is_an_error(content: bytes, said: str) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            stream = await Stream.of(ours)
            theirs.sendall(content)
            with pytest.raises(FrameError, match=said):
                await stream.receive()
            stream.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
