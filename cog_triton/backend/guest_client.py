"""Guest client: a second client of an engine process, which connects as soon as that listens.

Triton loads its models concurrently and is ready when all of them are, so only requests sent
before that are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cog_triton.backend.engine_client import EngineClient
from cog_triton.engines.step_items import TOKENS
from cog_triton.errors import TritonUnavailable
from cog_triton.system import local_socket

_RETRY_S = 0.05


class GuestConnector:
    """Connects to an engine process on a thread of its own, until it listens or `close`."""

    def __init__(self, socket: str, hello: str, on_open: Callable[[Connection, int], None]) -> None:
        """`on_open` gets the connection and the engine's max_batch_size."""
        self._socket = socket
        self._hello = hello
        self._on_open = on_open
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._connect, name="connector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop connecting."""
        self._closing.set()
        self._thread.join()

    def _connect(self) -> None:
        while not self._closing.is_set():
            try:
                connection = local_socket.connect(self._socket)
                connection.send(self._hello)
                slots = connection.recv()
            except (OSError, EOFError):
                self._closing.wait(_RETRY_S)
                continue
            self._on_open(connection, slots)
            return


class GuestClient:
    """Client of the engine process that ``tensorrt_llm`` owns; gets events as that does."""

    def __init__(self, socket: str) -> None:
        self._client: EngineClient | None = None
        self._connector = GuestConnector(socket, TOKENS, self._open)

    def submit(self, handle: int, request: Any, emit: Callable[[Any], None]) -> None:
        """See `EngineClient.submit`; raises E2105 before the engine is loaded."""
        if self._client is None:
            raise loading()
        self._client.submit(handle, request, emit)

    def cancel(self, handle: int) -> None:
        """See `EngineClient.cancel`."""
        if self._client is not None:
            self._client.cancel(handle)

    def close(self) -> None:
        """Stop connecting, or close the connection."""
        self._connector.close()
        if self._client is not None:
            self._client.close()

    def _open(self, connection: Connection, slots: int) -> None:
        # tensorrt_llm, whose child the engine is, ends the server when the engine dies.
        self._client = EngineClient(connection, slots, lambda: None)


def loading() -> TritonUnavailable:
    """The error of requests that come before the engine is loaded."""
    return TritonUnavailable("the engine is still loading; try again later")
