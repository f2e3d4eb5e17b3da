"""uvicorn on a thread beside Cog's worker, on a socket that is ours before anything is loaded."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from cog_triton.errors import InvalidArgument

_BACKLOG = 1024


def bind(name: str, host: str, port: int) -> socket.socket:
    """A listening socket; raises E1005 when the port is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, the first
    # token waits some 40 ms for the client's system to acknowledge the head.
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
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End what runs, after a second at most."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))
