"""A parent's host of Triton and engines in the test's own process, and a server's link to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cog_triton.ipc.messages import Stream
from cog_triton.processes.host import Host
from cog_triton.processes.parent_link import ParentLink


@asynccontextmanager
async def linked(run_dir: Path, host: Host | None = None) -> AsyncIterator[ParentLink]:
    """A link to a host, a new one unless given, whose processes then stand afterwards."""
    ours, theirs = socket.socketpair()
    stream, its = await Stream.of(ours), await Stream.of(theirs)
    used = host or Host(run_dir, stream.send)
    running = await used.running()
    used._report = stream.send
    stream.send(running)

    async def follow() -> None:
        with suppress(EOFError, OSError):
            while True:
                used.take(await stream.receive())

    following = asyncio.ensure_future(follow())
    link = ParentLink(its, await its.receive())
    try:
        yield link
    finally:
        ends = [link._reading, following]  # the end of the parent would end this process
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)
        if host is None:
            await used.stop(kills=True)
        its.close()
        stream.close()
        await asyncio.sleep(0)  # in which they close
