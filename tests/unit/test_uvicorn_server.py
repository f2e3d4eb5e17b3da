"""Listening socket of our HTTP server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cog_triton.system.ports import bind


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_sockets_have_nodelay(host: str) -> None:
    """Else the first token waits for the acknowledgement of the head, 40 ms on Linux."""
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")

    async def options() -> list[int]:
        found: asyncio.Queue[int] = asyncio.Queue()

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            found.put_nowait(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            await writer.wait_closed()

        listening = bind("OPENAI_PORT", host, 0, 64)
        async with await asyncio.start_server(met, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
            return [found.get_nowait()]

    assert asyncio.run(options()) == [1]


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
