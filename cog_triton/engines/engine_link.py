"""Link to an engine process: requests out, what they bring in, in the loop of `engine_client`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, cast

from cog_triton import errors
from cog_triton.engines import engine_messages, step_items
from cog_triton.engines.engine_messages import Event, Hello, Role, StepLoad, Welcome
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import TokenEvent
from cog_triton.engines.step_items import EncodedStep, StepItem
from cog_triton.ipc.framing import FrameDecoder, FrameError, frame
from cog_triton.system import local_socket

_RETRY_S = 0.02
Emit = Callable[[Any], None]


class EngineLink(asyncio.Protocol):
    """Connection to an engine process, and then to the one that takes its place.

    A request's events go to its `emit`, first tokens before later ones; those that queue up while
    others are emitted are coalesced.
    """

    def __init__(
        self, address: str, role: Role, on_report: Callable[[], None], *, coalesce: bool
    ) -> None:
        """`on_report` is called when `stats`, or the requests of other clients, have changed."""
        self.linked = threading.Event()
        """Set once an engine has welcomed us."""
        self.slots = 0
        """Requests that the engine computes at once."""
        self.stats: KVCacheStats | None = None
        self.step_requests = self.other_requests = 0
        self._before: KVCacheStats | None = None
        self._address = address
        self._role = role
        self._lost = asyncio.Event()
        self._on_report = on_report
        self._coalesce = coalesce
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self.emitters: dict[int, Emit] = {}
        """Of requests that have not ended, by handle; another thread adds them."""
        self._started: set[int] = set()  # handles that an event was emitted for

    @property
    def ready(self) -> bool:
        """Whether an engine is there."""
        return self.linked.is_set() and self._transport is not None

    async def connect(self) -> None:
        """Connect to an engine as soon as one is there; returns when it has hung up."""
        loop = asyncio.get_running_loop()
        while self._transport is None:
            try:
                own = local_socket.connect(self._address)
                await loop.create_unix_connection(lambda: self, sock=own)
            except OSError:
                await asyncio.sleep(_RETRY_S)
        try:
            await self._lost.wait()
        finally:
            self._hang_up()

    def send(self, handle: int, payload: bytes) -> None:
        """Send a message of a request, unless that has ended; without an engine all end."""
        if self._transport is None:
            self._fail_all()
        elif handle in self.emitters:
            self._transport.write(frame(payload))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast(asyncio.Transport, transport)
        self._decoder = FrameDecoder()
        self._lost.clear()
        self._transport.write(frame(engine_messages.encode(Hello(self._role))))

    def data_received(self, data: bytes) -> None:
        """Emit what has arrived."""
        events: list[tuple[int, Any]] = []
        try:
            for message in map(engine_messages.decode, self._decoder.feed(data)):
                if isinstance(message, EncodedStep):
                    ints, floats = message.items.tolist(), message.log_probs.tolist()
                    events += events_of(step_items.decode(ints, floats, message.errors))
                elif isinstance(message, Event):
                    events.append((message.handle, message.event))
                else:
                    self._take(message)
        except FrameError:
            self._hang_up()
        self._emit(events)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests with E2105: the engine's process is gone."""
        self._transport = None
        self._before, self.step_requests, self.other_requests = self.stats, 0, 0
        self._lost.set()
        self._fail_all()
        self._on_report()

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self.slots = message.max_batch_size
            self.linked.set()
        elif isinstance(message, StepLoad):
            self.step_requests, self.other_requests = message.requests, message.others
        elif isinstance(message, KVCacheStats):
            self.stats = message.after(self._before)
        self._on_report()

    def _emit(self, events: list[tuple[int, Any]]) -> None:
        if self._coalesce:
            events = sorted(coalesce_events(events), key=lambda of: of[0] in self._started)
        for handle, event in events:
            ended = event.finish is not None or event.error is not None
            (self._started.discard if ended else self._started.add)(handle)
            emit = (self.emitters.pop if ended else self.emitters.get)(handle, None)
            if emit is not None:
                emit(event)

    def _fail_all(self) -> None:
        self._started.clear()
        for handle in list(self.emitters):
            if (emit := self.emitters.pop(handle, None)) is not None:
                emit(TokenEvent([], [], error=engine_messages.engine_gone()))


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
