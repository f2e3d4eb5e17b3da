"""An ASGI application behind the front, which this process serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from socket import socket

from loop_thread import PORTAL
from starlette.types import ASGIApp

from cog_triton.front.cog_state import Upstream
from cog_triton.front.server import Front
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

    served = PORTAL.start_task_soon(serve)
    try:
        yield
    finally:
        stopped.set_result(None)
        served.result()
