"""uvicorn server on a thread of Cog's worker, on a socket bound before the engine is loaded."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from cog_triton.errors import InvalidArgument

_BACKLOG = 1024


def bind(name: str, host: str, port: int) -> socket.socket:
    """Open a listening socket; raises E1005 when the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, the first
    # token waits some 40 ms until the client acknowledges the response head.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise InvalidArgument(
            f"{name}={port}: cannot listen on {host}:{port}: {error.strerror or error};"
            f" choose another with {name}=..."
        ) from error
    return found


class HTTPServer:
    """Serves one application on a listening socket until `stop`, or until the process ends."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._socket = listening
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Start serving on a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; running requests get one second."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))
