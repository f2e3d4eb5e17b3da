"""An ASGI application behind the front, which this process serves on an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from socket import socket

from starlette.types import ASGIApp

from cog_triton.front.front import Front
from cog_triton.front.upstream import Upstream
from cog_triton.settings import Settings


@contextmanager
def serving(app: ASGIApp, listening: socket, settings: Settings) -> Iterator[None]:
    stopped: Future[None] = Future()

    async def serve() -> None:
        given = {"OPENAI_PORT": listening}, Upstream({}), {"OPENAI_PORT": app}
        front = Front(settings, 4096, *given)
        front.listen()
        await asyncio.wrap_future(stopped)
        await front.close()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(asyncio.run, serve())
        try:
            yield
        finally:
            stopped.set_result(None)
            served.result()
