"""Engine client: one engine process or several of one model, each request on one of them.

A prompt whose first tokens an engine has computed lately is cheaper there, as it finds them in its
KV cache; the engine with the least work answers soonest. Both are counted alike: so many tokens of
a prompt weigh as much as one more request.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from cog_triton import errors
from cog_triton.engines import engine_messages, step_items
from cog_triton.engines.base import EngineStats
from cog_triton.engines.engine_messages import Cancel, Event, Hello, Role, StepLoad, Welcome
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import TokenEvent
from cog_triton.engines.step_items import EncodedStep, StepItem
from cog_triton.errors import TritonUnavailable
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


TOKENS_A_REQUEST = 256
"""Tokens of a prompt that weigh as much as a request that runs."""
_SHORTEST = 32
_MAX_PREFIXES = 8192


class ReplicaChoice:
    """Chooses by load and by prefix; thread-safe.

    It knows prefixes of 32, 64, 128, ... tokens, the last 8192 that were sent to any engine: what
    an engine has dropped from its cache since then is taken for a hit.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._lock = threading.Lock()
        self._last = -1

    def choose(
        self, prompt: Sequence[int], loads: Mapping[int, float], adapter: str | None = None
    ) -> int:
        """The engine for `prompt` among those of `loads`, at least one: work of each in requests.

        One that has a prefix gets it, unless it has more than a request for every 256 tokens of
        that prefix more to do than the least busy one. Of equals, they take turns. Prefixes of
        another `adapter` are others.
        """
        prefixes = list(_prefixes(prompt, adapter))
        with self._lock:
            count = max(loads) + 1
            known = dict.fromkeys(loads, 0)  # tokens of the longest prefix that each was sent
            known |= {at: size for size, key in prefixes for at in loads if (at, key) in self._sent}
            engine = min(
                loads,
                key=lambda engine: (
                    loads[engine] - known[engine] / TOKENS_A_REQUEST,
                    (engine - self._last - 1) % count,
                ),
            )
            self._last = engine
            for _, key in prefixes:
                self._sent[engine, key] = None
                self._sent.move_to_end((engine, key))
            while len(self._sent) > _MAX_PREFIXES:
                self._sent.popitem(last=False)
        return engine

    def forget(self, engine: int) -> None:
        """Forget the prefixes of an engine that has died."""
        with self._lock:
            for place in [place for place in self._sent if place[0] == engine]:
                del self._sent[place]


def _prefixes(prompt: Sequence[int], adapter: str | None) -> Iterator[tuple[int, int]]:
    """Length and hash of each prefix, from the shortest."""
    content = memoryview(array("i", iter(prompt)).tobytes())  # of bytes, each is a number
    size, length = array("i").itemsize, _SHORTEST
    while length <= len(prompt):
        yield length, hash((adapter, bytes(content[: length * size])))
        length *= 2


class EngineClient:
    """Client of engines of one model.

    It connects again to an engine that has hung up, as another takes its address. Requests go to
    engines that are there. When one dies its requests end with E2105, and so do those that come
    before another takes its place, unless others serve.
    """

    def __init__(self, addresses: Sequence[str], role: Role, *, coalesce: bool = True) -> None:
        """Without `coalesce` each event is emitted by itself. It connects at its `start`."""
        self.on_kv_cache: Callable[[], None] = lambda: None
        """Called, on any thread, when an engine has reported what changes `stats`."""
        self._choice = ReplicaChoice()
        self._closing = asyncio.Event()
        self._links = [
            EngineLink(address, role, lambda: self.on_kv_cache(), coalesce=coalesce)
            for address in addresses
        ]
        self._thread = threading.Thread(target=self._run, name="engine-links", daemon=True)

    def start(self) -> None:
        """Start to connect to all engines."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def wait_until_linked(self) -> None:
        """Wait until each engine was there once."""
        for link in self._links:
            link.linked.wait()

    def loads(self) -> Mapping[int, int]:
        """Number of requests in each engine that is there."""
        return {n: len(link.emitters) for n, link in enumerate(self._links) if link.ready}

    def submit(
        self, handle: int, request: Any, emit: Emit, prompt: Sequence[int] | None = None
    ) -> None:
        """Queue a request under a new handle; never blocks. `emit` runs on another thread.

        `prompt` distinguishes prompts, by default its `input_ids`. A request that cannot be served
        ends with an ``error`` event. Raises E2105 before an engine is loaded.
        """
        chosen, loads = 0, self.loads()
        if len(self._links) > 1 and loads:
            adapter = getattr(request, "adapter", None)
            prompt = request.input_ids if prompt is None else prompt
            chosen = self._choice.choose(prompt, loads, adapter)
        if not self._links[chosen].linked.is_set():
            raise _loading()
        self._send(self._links[chosen], handle, request, emit)

    def cancel(self, handle: int) -> None:
        """Stop a request; it ends with a ``cancelled`` event. Unknown handles are no error."""
        payload = engine_messages.encode(Cancel(handle))
        for link in self._links:
            if handle in link.emitters:
                self._loop.call_soon_threadsafe(link.send, handle, payload)

    def stats(self) -> EngineStats:
        """Current request counts: sums."""
        links = self._links
        active = [len(link.emitters) + link.other_requests for link in links]
        return EngineStats(
            sum(active),
            sum(max(0, n - link.slots) for n, link in zip(active, links, strict=True)),
            sum(link.slots for link in links),
            KVCacheStats.of_engines([link.stats for link in links if link.stats is not None]),
            sum(link.step_requests for link in links),
        )

    def close(self) -> None:
        """Disconnect; engine processes continue."""
        if self._thread.is_alive():
            self.on_kv_cache = lambda: None  # Triton that waits for us takes no metrics
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _send(self, link: EngineLink, handle: int, request: Any, emit: Emit) -> None:
        payload = engine_messages.submit(handle, request)
        link.emitters[handle] = emit
        self._loop.call_soon_threadsafe(link.send, handle, payload)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._follow_all())

    async def _follow_all(self) -> None:
        works = [self._closing.wait(), *map(self._follow, range(len(self._links)))]
        tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _follow(self, number: int) -> None:
        while True:
            await self._links[number].connect()
            self._choice.forget(number)  # its successor's cache is empty


def _loading() -> TritonUnavailable:
    return TritonUnavailable("the engine is still loading; try again later")
