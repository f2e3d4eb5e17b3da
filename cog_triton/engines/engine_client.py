"""Engine client: one engine process or several of one model, each request on one of them.

A prompt whose first tokens an engine has computed lately is cheaper there, as it finds them in its
KV cache; the engine with the least work answers soonest. Both are counted alike: so many tokens of
a prompt weigh as much as one more request.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cog_triton.engines.base import EngineStats, TokenEngine
from cog_triton.engines.engine_link import Emit, EngineLink
from cog_triton.engines.engine_messages import Role, StepLoad
from cog_triton.engines.engine_spec import own_addresses
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.errors import TritonUnavailable

TOKENS_A_REQUEST = 256
"""Tokens of a prompt that weigh as much as a request that runs."""
_SHORTEST = 32
_MAX_PREFIXES = 8192
_RETRY_S = 0.02


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
            engine = min(
                loads,
                key=lambda engine: (
                    loads[engine] - self._known(engine, prefixes) / TOKENS_A_REQUEST,
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

    def _known(self, engine: int, prefixes: Sequence[tuple[int, int]]) -> int:
        """Tokens of the longest of `prefixes` that the engine was sent."""
        known = (length for length, key in reversed(prefixes) if (engine, key) in self._sent)
        return next(known, 0)


def _prefixes(prompt: Sequence[int], adapter: str | None) -> Iterator[tuple[int, int]]:
    """Length and hash of each prefix, from the shortest."""
    content = memoryview(array("i", iter(prompt)).tobytes())  # of bytes, each is a number
    size, length = array("i").itemsize, _SHORTEST
    while length <= len(prompt):
        yield length, hash((adapter, bytes(content[: length * size])))
        length *= 2


def engine_opener(engine: str) -> Callable[[Mapping[str, str]], TokenEngine]:
    """An `open_engine` for `make_token_model`, of the engine ``module:class``.

    The server starts that in a process; here its client waits until it is loaded.
    """

    def open_engine(parameters: Mapping[str, str]) -> TokenEngine:
        coalesce = parameters.get("coalesce") != "false"
        client = EngineClient(own_addresses(), "owner", coalesce=coalesce)
        client.start()
        client.wait_until_linked()
        return client

    return open_engine


class EngineClient:
    """Client of engines of one model; a `TokenEngine`, and more.

    It connects again to an engine that has hung up, as another takes its address. Requests go to
    engines that are there. When one dies its requests end with E2105, and so do those that come
    before another takes its place, unless others serve.
    """

    def __init__(self, addresses: Sequence[str], role: Role, *, coalesce: bool = True) -> None:
        """Without `coalesce` each event is emitted by itself. It connects at its `start`."""
        self.on_kv_cache: Callable[[], None] = lambda: None
        self._role = role
        self._coalesce = coalesce
        self._choice = ReplicaChoice()
        self._closing = threading.Event()
        self._told: dict[int, KVCacheStats] = {}
        self._step_requests: dict[int, int] = {}
        self._gone: KVCacheStats | None = None
        self._links: list[EngineLink | None] = [None] * len(addresses)
        self._first_links = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._follow, args=place, name="engine-link", daemon=True)
            for place in enumerate(addresses)
        ]

    def start(self) -> None:
        """Start to connect to all engines."""
        for thread in self._threads:
            thread.start()

    def wait_until_linked(self) -> None:
        """Wait until each engine was there once."""
        for _ in self._links:
            self._first_links.acquire()

    def loads(self) -> Mapping[int, int]:
        """Number of requests in each engine that is there."""
        links = enumerate(self._links)
        return {n: link.active for n, link in links if link is not None and not link.ended}

    def submit(
        self, handle: int, request: Any, emit: Emit, prompt: Sequence[int] | None = None
    ) -> None:
        """See `TokenEngine.submit`; `prompt` tells prompts apart, by default its `input_ids`.

        Raises E2105 before an engine is loaded.
        """
        chosen, loads = 0, self.loads()
        if len(self._links) > 1 and loads:
            adapter = getattr(request, "adapter", None)
            prompt = request.input_ids if prompt is None else prompt
            chosen = self._choice.choose(prompt, loads, adapter)
        self._linked(chosen).submit(handle, request, emit)

    def ask_all(
        self, handle: int, request: Any, answer: Callable[[Mapping[int, Any]], None]
    ) -> None:
        """Ask all engines that are there; `answer` gets the event that each answers with.

        Raises E2105 before one is loaded.
        """
        asked = self.loads()
        if not asked:
            raise _loading()
        events: dict[int, Any] = {}
        lock = threading.Lock()

        def emit(number: int, event: Any) -> None:
            with lock:
                events[number] = event
                complete = len(events) == len(asked)
            if complete:
                answer(events)

        for number in asked:
            self._linked(number).submit(handle, request, partial(emit, number))

    def cancel(self, handle: int) -> None:
        """See `TokenEngine.cancel`."""
        for link in self._links:
            if link is not None:
                link.cancel(handle)

    @property
    def max_batch_size(self) -> int:
        """Requests that all engines compute at once."""
        return sum(link.max_batch_size for link in self._links if link is not None)

    def stats(self) -> EngineStats:
        """See `TokenEngine.stats`: sums."""
        links = [link for link in self._links if link is not None]
        return EngineStats(
            sum(link.active for link in links),
            sum(max(0, link.active - link.max_batch_size) for link in links),
            self.max_batch_size,
            self._kv_cache(),
            sum(self._step_requests.values()),
        )

    def close(self) -> None:
        """See `TokenEngine.close`; engine processes continue."""
        self._closing.set()
        for link in self._links:
            if link is not None:
                link.close()
        for thread in self._threads:
            thread.join()

    def _follow(self, number: int, address: str) -> None:
        """Link the engine at an address, and the one that takes its place."""
        while not self._closing.is_set():
            ended = threading.Event()
            try:
                link = EngineLink(
                    address,
                    self._role,
                    on_end=ended.set,
                    on_stats=partial(self._take, number),
                    coalesce=self._coalesce,
                )
            except (OSError, EOFError):
                self._closing.wait(_RETRY_S)
                continue
            dead, self._links[number] = self._links[number], link
            link.start()
            if dead is None:
                self._first_links.release()
            else:
                dead.close()
            if self._closing.is_set():
                link.close()
                return
            ended.wait()
            if self._closing.is_set():
                return
            self._choice.forget(number)  # its successor's cache is empty
            self._take(number, StepLoad(0))

    def _linked(self, number: int) -> EngineLink:
        link = self._links[number]
        if link is None:
            raise _loading()
        return link

    def _take(self, number: int, new: KVCacheStats | StepLoad) -> None:
        """Take statistics of an engine; a cache that is gone counts on in the sum."""
        if isinstance(new, StepLoad):
            self._step_requests[number] = new.requests
            self.on_kv_cache()
            return
        old = self._told.get(number)
        if old is not None and (new.prefix_queries or 0) < (old.prefix_queries or 0):
            self._gone = KVCacheStats.of_engines([old, *([self._gone] if self._gone else [])])
        self._told[number] = new
        self.on_kv_cache()

    def _kv_cache(self) -> KVCacheStats | None:
        total, before = KVCacheStats.of_engines(list(self._told.values())), self._gone
        if total is None or before is None:
            return total
        return replace(
            total,
            prefix_queries=_plus(total.prefix_queries, before.prefix_queries),
            prefix_hits=_plus(total.prefix_hits, before.prefix_hits),
        )


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _loading() -> TritonUnavailable:
    """The error of requests that come before the engine is loaded."""
    return TritonUnavailable("the engine is still loading; try again later")
