"""An ASGI application that this process serves on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

from starlette.types import ASGIApp

from cog_triton.serving.openai.listeners import HTTPServer


@contextmanager
def serving(app: ASGIApp, listening: socket) -> Iterator[None]:
    server = HTTPServer(app, listening)
    thread = threading.Thread(target=lambda: asyncio.run(server.run_until_exit()))
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
