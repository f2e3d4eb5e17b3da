"""Step client: guest of an engine process that gets each step as one message."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cog_triton.backend.engine_client import engine_gone
from cog_triton.backend.guest_client import GuestConnector, loading
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import STEPS

OnStep = Callable[[bytes, bytes, list[str]], None]


class StepClient:
    """Client that connects once the engine process listens; its handles are the caller's."""

    def __init__(
        self,
        socket: str,
        on_open: Callable[[], None],
        on_step: OnStep,
        on_death: Callable[[], None],
    ) -> None:
        """All three are called from threads of the client; see `engine_peers.StepPeer`.

        `on_death` is called once when the engine hangs up, after the last `on_step`.
        """
        self._on_open = on_open
        self._on_step = on_step
        self._on_death = on_death
        self._connection: Connection | None = None
        self._threads: list[threading.Thread] = []
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False
        self.max_batch_size = 0
        self._connector = GuestConnector(socket, STEPS, self._open)

    @property
    def is_open(self) -> bool:
        """Whether the engine takes requests."""
        return self._connection is not None and not self._ended

    def submit(self, handle: int, request: EngineRequest) -> None:
        """Queue a request; raises E2105 while the engine loads, and once it is gone."""
        if self._connection is None:
            raise loading()
        if self._ended:
            raise engine_gone()
        self._outbox.put(("submit", handle, request))

    def cancel(self, handle: int) -> None:
        """Stop a request; its last item follows. Unknown handles are no error."""
        self._outbox.put(("cancel", handle, None))

    def close(self) -> None:
        """Stop connecting, or hang up."""
        self._connector.close()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()

    def _open(self, connection: Connection, slots: int) -> None:
        self.max_batch_size = slots
        self._threads = [
            threading.Thread(target=self._read, args=[connection], name="steps", daemon=True),
            threading.Thread(target=self._write, args=[connection], name="requests", daemon=True),
        ]
        self._connection = connection
        for thread in self._threads:
            thread.start()
        self._on_open()

    def _write(self, connection: Connection) -> None:
        while True:
            message = self._outbox.get()
            try:
                connection.send(message)
            except OSError:  # `_read` tells
                return
            if message is None:
                return

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                _, items, log_probs, errors = connection.recv()
            except (EOFError, OSError):
                self._ended = True
                self._on_death()
                return
            self._on_step(items, log_probs, errors)
