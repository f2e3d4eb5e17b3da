"""Link to an engine process: requests out on one thread, what they bring in on another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from cog_triton import errors
from cog_triton.engines import engine_messages, step_items
from cog_triton.engines.engine_messages import Cancel, Event, Hello, Role, StepLoad, Welcome
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import TokenEvent
from cog_triton.engines.step_items import EncodedStep, StepItem
from cog_triton.errors import TritonUnavailable
from cog_triton.ipc.framing import FrameSocket
from cog_triton.system import local_socket

Emit = Callable[[Any], None]


class EngineLink:
    """Connection to one engine process, until that or we hang up.

    A request's events go to its `emit`, first tokens before later ones; those that queue up while
    others are emitted are coalesced.
    """

    def __init__(
        self,
        address: str,
        role: Role,
        *,
        on_end: Callable[[], None],
        on_stats: Callable[[KVCacheStats | StepLoad], None],
        coalesce: bool = True,
    ) -> None:
        """`on_end` is called once, when the engine has hung up; all three on the reading thread.

        Raises OSError or EOFError when the engine is not there. Nothing is read before `start`.
        """
        self._frames = FrameSocket(local_socket.connect(address))
        try:
            self._frames.send(engine_messages.encode(Hello(role)))
            welcome = engine_messages.decode(self._frames.receive())
        except (OSError, EOFError):
            self._frames.close()
            raise
        assert isinstance(welcome, Welcome)
        self.max_batch_size = welcome.max_batch_size
        self.ended = False
        """Whether one of both has hung up."""
        self._on_end = on_end
        self._on_stats = on_stats
        self._coalesce = coalesce
        self._emitters: dict[int, Emit] = {}
        self._started: set[int] = set()  # handles that an event was emitted for
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # a start and a close may come at once
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine-requests", daemon=True)

    @property
    def active(self) -> int:
        """Number of requests that have not ended."""
        return len(self._emitters)

    def start(self) -> None:
        """Start to read and write, unless it is closed."""
        with self._lock:
            if not self._closed:
                self._reader.start()
                self._writer.start()

    def submit(self, handle: int, request: Any, emit: Emit) -> None:
        """Queue a request under a new handle; `emit` is never called by the calling thread."""
        self._emitters[handle] = emit
        self._outbox.put(engine_messages.submit(handle, request))

    def cancel(self, handle: int) -> None:
        """Stop a request; its last event follows. Unknown handles are no error."""
        self._outbox.put(engine_messages.encode(Cancel(handle)))

    def close(self) -> None:
        """Hang up; what has not ended ends with E2105."""
        with self._lock:
            self._closed = True
        self._outbox.put(None)
        self._frames.hang_up()
        if self._writer.ident is None:
            self._fail_all()
        else:
            self._writer.join()
            self._reader.join()
        self._frames.close()

    def _write(self) -> None:
        while (payload := self._outbox.get()) is not None:
            try:
                self._frames.send(payload)
            except OSError:
                self._reader.join()  # two threads must not emit for one request
                self._fail_all()

    def _read(self) -> None:
        while True:
            try:
                payloads = self._frames.receive_all()
                messages = [engine_messages.decode(payload) for payload in payloads]
            except (EOFError, OSError):  # an OSError when it died within a message
                self.ended = True
                self._fail_all()
                self._on_end()
                return
            events: list[tuple[int, Any]] = []
            for message in messages:
                if isinstance(message, EncodedStep):
                    ints, floats = message.items.tolist(), message.log_probs.tolist()
                    events += events_of(step_items.decode(ints, floats, message.errors))
                elif isinstance(message, Event):
                    events.append((message.handle, message.event))
                elif isinstance(message, KVCacheStats | StepLoad):
                    self._on_stats(message)
            self._emit(events)

    def _emit(self, events: list[tuple[int, Any]]) -> None:
        if self._coalesce:
            events = sorted(coalesce_events(events), key=lambda of: of[0] in self._started)
        for handle, event in events:
            ended = event.finish is not None or event.error is not None
            (self._started.discard if ended else self._started.add)(handle)
            emit = (self._emitters.pop if ended else self._emitters.get)(handle, None)
            if emit is not None:
                emit(event)

    def _fail_all(self) -> None:
        """End every request with E2105: the engine's process is gone."""
        error = engine_gone()
        for handle in list(self._emitters):
            if (emit := self._emitters.pop(handle, None)) is not None:
                emit(TokenEvent([], [], error=error))


def events_of(items: Iterable[StepItem]) -> Iterator[tuple[int, TokenEvent]]:
    """The event of each item; tokens that end in an error are an event of their own."""
    for handle, sequence, offset, ids, log_probs, end, text, _, alternatives in items:
        finish, error = step_items.FINISH_REASONS.get(end), None
        if end == step_items.ERROR:
            error = errors.from_text(text or "") or errors.TritonUnknownError(text or "")
        if sequence == step_items.CACHED:
            continue
        if sequence == step_items.PROMPT:
            length = 0 if ids else offset
            yield (
                handle,
                TokenEvent(
                    ids, log_probs, alternatives=alternatives, of_prompt=True, prompt_length=length
                ),
            )
        elif sequence == step_items.EMBEDDING:
            yield handle, TokenEvent([], [], finish, error, embedding=log_probs)
        elif error is None or not ids:
            yield handle, TokenEvent(ids, log_probs, finish, error, alternatives)
        else:
            yield handle, TokenEvent(ids, log_probs, alternatives=alternatives)
            yield handle, TokenEvent([], [], error=error)


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


def engine_gone() -> TritonUnavailable:
    """The error of requests that a dead engine leaves behind."""
    return TritonUnavailable("the engine's process has ended; try again later")
