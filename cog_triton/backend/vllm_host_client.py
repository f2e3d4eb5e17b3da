"""Client of the vLLM host for ``vllm_model``: connects as soon as the host listens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cog_triton.backend.engine_client import EngineClient
from cog_triton.engines.vllm.host_connections import connect
from cog_triton.errors import TritonUnavailable

_RETRY_S = 0.05


class VLLMHostClient:
    """Client that connects once ``tensorrt_llm`` has loaded the engine.

    Triton loads its models concurrently and is ready when all of them are, so only requests sent
    before that are refused.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._client: EngineClient | None = None
        self._closing = threading.Event()
        self._connector = threading.Thread(target=self._connect, name="connector", daemon=True)
        self._connector.start()

    def submit(self, handle: int, request: Any, emit: Callable[[Any], None]) -> None:
        """See `EngineClient.submit`; raises E2105 before the engine is loaded."""
        if self._client is None:
            raise TritonUnavailable("the engine is still loading; try again later")
        self._client.submit(handle, request, emit)

    def cancel(self, handle: int) -> None:
        """See `EngineClient.cancel`."""
        if self._client is not None:
            self._client.cancel(handle)

    def close(self) -> None:
        """Stop connecting, or close the connection."""
        self._closing.set()
        self._connector.join()
        if self._client is not None:
            self._client.close()

    def _connect(self) -> None:
        while not self._closing.is_set():
            try:
                connection = connect(self._socket)
                slots = connection.recv()
            except (OSError, EOFError):
                self._closing.wait(_RETRY_S)
                continue
            # tensorrt_llm, whose child the host is, ends the server when the host dies.
            self._client = EngineClient(connection, slots, lambda: None)
            return
