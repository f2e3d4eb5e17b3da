"""Step client: guest of an engine process that gets each step as one message."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cog_triton.backend.engine_client import engine_gone
from cog_triton.backend.guest_client import GuestConnector, Locate, loading
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import STEPS

OnStep = Callable[[bytes, bytes, list[str]], None]


class StepClient:
    """Client that connects once the engine process listens, and again when that was replaced.

    Its handles are the caller's.
    """

    def __init__(
        self,
        locate: Locate,
        on_open: Callable[[], None],
        on_step: OnStep,
        on_death: Callable[[], None],
    ) -> None:
        """All three are called from threads of the client; see `engine_peers.StepPeer`.

        `on_death` is called when the engine hangs up, after its last `on_step` and before the next
        `on_open`.
        """
        self._on_open = on_open
        self._on_step = on_step
        self._on_death = on_death
        self._link: _Link | None = None
        self.max_batch_size = 0
        self._connector = GuestConnector(locate, STEPS, self._open)

    @property
    def is_open(self) -> bool:
        """Whether the engine takes requests."""
        return self._link is not None and not self._link.ended

    def submit(self, handle: int, request: EngineRequest) -> None:
        """Queue a request; raises E2105 while the engine loads, and once it is gone."""
        if self._link is None:
            raise loading()
        if self._link.ended:
            raise engine_gone()
        self._link.outbox.put(("submit", handle, request))

    def cancel(self, handle: int) -> None:
        """Stop a request; its last item follows. Unknown handles are no error."""
        if self._link is not None:
            self._link.outbox.put(("cancel", handle, None))

    def close(self) -> None:
        """Stop connecting, or hang up."""
        self._connector.close()
        if self._link is not None:
            self._link.close()

    def _open(self, connection: Connection, slots: int) -> None:
        if self._link is not None:
            self._link.close()
        self.max_batch_size = slots
        self._link = _Link(connection, self._on_step, self._lost)
        self._on_open()

    def _lost(self) -> None:
        self._on_death()
        self._connector.lost()


class _Link:
    """One connection to an engine process, with its threads."""

    def __init__(self, connection: Connection, on_step: OnStep, on_end: Callable[[], None]) -> None:
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = False
        self._connection = connection
        self._on_step = on_step
        self._on_end = on_end
        self._threads = [
            threading.Thread(target=self._read, name="steps", daemon=True),
            threading.Thread(target=self._write, name="requests", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Hang up."""
        self.outbox.put(None)
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        while True:
            message = self.outbox.get()
            try:
                self._connection.send(message)
            except OSError:  # `_read` tells
                return
            if message is None:
                return

    def _read(self) -> None:
        while True:
            try:
                _, items, log_probs, errors = self._connection.recv()
            except (EOFError, OSError):
                self.ended = True
                self._on_end()
                return
            self._on_step(items, log_probs, errors)
