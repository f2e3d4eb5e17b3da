"""uvicorn server on a thread of Cog's worker, on a socket bound before the engine is loaded."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 4096


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
            backlog=BACKLOG,
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
