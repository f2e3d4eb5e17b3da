"""Client of an engine in another process: requests out, events in, over one pipe.

Events that queue up while responses are being sent are coalesced.
"""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable, Iterator
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

from cog_triton.engines.base import EngineStats
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import TritonUnavailable

Emit = Callable[[Any], None]
_MAX_EVENTS_AT_ONCE = 4096


def coalesce_events(events: list[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Coalesce each request's events: a response costs the same whatever its size."""
    of_handle: dict[int, list[Any]] = {}
    for handle, event in events:
        of_handle.setdefault(handle, []).append(event)
    for handle, found in of_handle.items():
        for _, alike in groupby(found, _coalescing_key):
            first, *others = alike
            yield handle, type(first).coalesce([first, *others]) if others else first


def _coalescing_key(event: Any) -> tuple[type, bool]:
    """Equal for events that may be coalesced; errors and cancellations carry no output."""
    return type(event), event.error is not None or event.finish == "cancelled"


class EngineClient:
    """Client of an engine in another process; see `cog_triton.engines.base.TokenEngine`.

    Requests and events may be of any class the engine knows. An event needs `finish` and `error`,
    which mark a request's last one, and a `coalesce` as `TokenEvent` has, unless no request gets
    two. First tokens are emitted before later ones.
    """

    def __init__(
        self,
        connection: Connection,
        max_batch_size: int,
        on_death: Callable[[], None],
        *,
        coalesce: bool = True,
    ) -> None:
        """`on_death` is called once when the engine hangs up before it is asked to.

        Without `coalesce` each event is emitted by itself.
        """
        self._connection = connection
        self._poller = select.poll()  # Connection.poll makes a new one for each call
        self._poller.register(connection, select.POLLIN)
        self._max_batch_size = max_batch_size
        self._on_death = on_death
        self._coalesce = coalesce
        self._closing = False
        self.ended = False
        """Whether the engine has hung up."""
        self._kv_cache: KVCacheStats | None = None
        self.on_kv_cache: Callable[[], None] = lambda: None
        """Called, on another thread, when the engine has told of its KV cache."""
        self._emitters: dict[int, Emit] = {}
        self._started: set[int] = set()  # handles that an event was emitted for
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine-requests", daemon=True)
        self._reader.start()
        self._writer.start()

    def submit(self, handle: int, request: Any, emit: Emit) -> None:
        """See `TokenEngine.submit`."""
        self._emitters[handle] = emit
        self._outbox.put(("submit", handle, request))

    def cancel(self, handle: int) -> None:
        """See `TokenEngine.cancel`."""
        self._outbox.put(("cancel", handle, None))

    def stats(self) -> EngineStats:
        """See `TokenEngine.stats`."""
        active = len(self._emitters)
        slots = self._max_batch_size
        return EngineStats(active, max(0, active - slots), slots, self._kv_cache)

    def close(self) -> None:
        """See `TokenEngine.close`."""
        self._closing = True
        self._outbox.put(None)
        self._writer.join()
        self._reader.join()

    def _write(self) -> None:
        message = ...
        while message is not None:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                self._reader.join()  # two threads must not emit for one request
                self._fail_all()

    def _read(self) -> None:
        while True:
            try:
                arrived = self._receive()
            except (EOFError, OSError):  # an OSError when it died within a message
                self.ended = True
                self._fail_all()
                if not self._closing:
                    self._on_death()
                return
            if self._coalesce:
                arrived = sorted(coalesce_events(arrived), key=lambda of: of[0] in self._started)
            for handle, event in arrived:
                ended = event.finish is not None or event.error is not None
                (self._started.discard if ended else self._started.add)(handle)
                emit = (self._emitters.pop if ended else self._emitters.get)(handle, None)
                if emit is not None:
                    emit(event)

    def _receive(self) -> list[tuple[int, Any]]:
        """The next message, and those that arrived while the last events were emitted."""
        events = self._next_events()
        while self._coalesce and len(events) < _MAX_EVENTS_AT_ONCE and self._poller.poll(0):
            try:
                events += self._next_events()
            except (EOFError, OSError):
                break  # the next call raises it again
        return events

    def _next_events(self) -> list[tuple[int, Any]]:
        message: list[tuple[int, Any]] | KVCacheStats = self._connection.recv()
        if isinstance(message, KVCacheStats):
            self._kv_cache = message
            self.on_kv_cache()
            return []
        return message

    def _fail_all(self) -> None:
        """End every request with E2105: the engine's process is gone."""
        error = engine_gone()
        for handle in list(self._emitters):
            if (emit := self._emitters.pop(handle, None)) is not None:
                emit(TokenEvent([], [], error=error))


def engine_gone() -> TritonUnavailable:
    """The error of requests that a dead engine leaves behind."""
    return TritonUnavailable("the engine's process has ended; try again later")
