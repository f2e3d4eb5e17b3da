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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cog_triton.engines import engine_messages
from cog_triton.engines.base import EngineStats
from cog_triton.engines.engine_link import Emit, EngineLink
from cog_triton.engines.engine_messages import Cancel, Role
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.errors import TritonUnavailable

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
    """The error of requests that come before the engine is loaded."""
    return TritonUnavailable("the engine is still loading; try again later")
