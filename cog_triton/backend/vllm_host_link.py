"""``vllm_model``'s connection to the engine's host, made as soon as that listens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cog_triton.backend.engine_process import EngineLink
from cog_triton.engines.vllm.engine_peers import connect
from cog_triton.errors import TritonUnavailable

_RETRY_S = 0.05


class HostLink:
    """An `EngineLink` that is there once ``tensorrt_llm`` has loaded the engine.

    Triton loads its models side by side and is ready when all of them are, so requests that come
    too early ask for it.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._link: EngineLink | None = None
        self._closing = threading.Event()
        self._connector = threading.Thread(target=self._connect, name="connector", daemon=True)
        self._connector.start()

    def submit(self, handle: int, request: Any, emit: Callable[[Any], None]) -> None:
        """See `EngineLink.submit`; raises E2105 before the engine is loaded."""
        if self._link is None:
            raise TritonUnavailable("the engine is still loading; try again later")
        self._link.submit(handle, request, emit)

    def cancel(self, handle: int) -> None:
        """See `EngineLink.cancel`."""
        if self._link is not None:
            self._link.cancel(handle)

    def close(self) -> None:
        """Stop looking, or hang up."""
        self._closing.set()
        self._connector.join()
        if self._link is not None:
            self._link.close()

    def _connect(self) -> None:
        while not self._closing.is_set():
            try:
                connection = connect(self._socket)
                slots = connection.recv()
            except (OSError, EOFError):
                self._closing.wait(_RETRY_S)
                continue
            # tensorrt_llm, whose child the host is, ends the server when the host dies.
            self._link = EngineLink(connection, slots, lambda: None)
            return
