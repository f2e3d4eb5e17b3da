"""Engine client: one engine process or several of one model, each request on one of them.

A prompt whose first tokens an engine has computed lately is cheaper there, as it finds them in its
KV cache; the engine with the least work answers soonest. Both are counted alike: so many tokens of
a prompt weigh as much as one more request.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from cog_triton.engines.base import EngineStats, TokenEngine
from cog_triton.engines.engine_connectors import Connector, GuestConnector, LeaseConnector
from cog_triton.engines.engine_link import Emit, EngineLink
from cog_triton.engines.engine_messages import Role, StepLoad
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.errors import TritonUnavailable
from cog_triton.keeper.engine_lease import keeper_name, locate_engine, replica_count
from cog_triton.keeper.keeper_messages import EngineSpec

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
    """An `open_engine` for `make_token_model`; `engine` is ``module:class``."""

    def open_engine(parameters: Mapping[str, str]) -> TokenEngine:
        spec, owner, count = EngineSpec.of(engine, parameters), os.getppid(), replica_count()
        return leased_engines(keeper_name(), spec, owner, count)

    return open_engine


def leased_engines(keeper: str, spec: EngineSpec, owner: int = 0, count: int = 1) -> EngineClient:
    """Client of `count` engines that the keeper leases to this stub, of the tritonserver `owner`.

    Waits for all of them; raises what `LeaseConnector` does, and has none then.
    """
    connectors = [LeaseConnector(keeper, spec, owner, replica) for replica in range(count)]
    coalesce = dict(spec.parameters).get("coalesce") != "false"
    client = EngineClient(connectors, "owner", coalesce=coalesce)
    client.start()
    return client


def guest_connectors() -> Sequence[Connector]:
    """Connectors to the engines that are leased to the tritonserver of this stub."""
    find = partial(locate_engine, keeper_name(), os.getppid())
    return [GuestConnector(partial(find, number)) for number in range(replica_count())]


class EngineClient:
    """Client of engines of one model; a `TokenEngine`, and more.

    Requests go to engines that are there. When one dies its requests end with E2105, and so do
    those that come before another takes its place, unless others serve.
    """

    def __init__(
        self,
        connectors: Sequence[Connector],
        role: Role,
        *,
        on_open: Callable[[int], None] = lambda number: None,
        coalesce: bool = True,
    ) -> None:
        """`on_open` gets the number of each engine that is connected, on threads of the client.

        Without `coalesce` each event is emitted by itself. It connects at its `start`.
        """
        self.on_kv_cache: Callable[[], None] = lambda: None
        self._role = role
        self._on_open = on_open
        self._coalesce = coalesce
        self._choice = ReplicaChoice()
        self._closing = False
        self._told: dict[int, KVCacheStats] = {}
        self._step_requests: dict[int, int] = {}
        self._gone: KVCacheStats | None = None
        self._connectors = connectors
        self._links: list[EngineLink | None] = [None] * len(connectors)
        for number, connector in enumerate(connectors):
            connector.on_address = partial(self._link, number)
            connector.others_serve = lambda: self.serves

    def start(self) -> None:
        """Connect to all engines at once; lets go of all if one cannot be had, and raises why."""
        if len(self._connectors) == 1:
            self._connectors[0].start()
            return
        with ThreadPoolExecutor(len(self._connectors)) as pool:
            starting = [pool.submit(connector.start) for connector in self._connectors]
        failures = [error for one in starting if (error := one.exception()) is not None]
        if failures:
            self.close()
            raise failures[0]

    @property
    def serves(self) -> bool:
        """Whether an engine is there."""
        return bool(self.loads())

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
        """See `TokenEngine.close`; engine processes go on."""
        if self._closing:
            return
        self._closing = True
        for connector in self._connectors:
            connector.close()
        for link in self._links:
            if link is not None:
                link.close()
        for connector in self._connectors:
            connector.release()

    def _link(self, number: int, address: str) -> None:
        link = EngineLink(
            address,
            self._role,
            on_end=partial(self._ended, number),
            on_stats=partial(self._tell, number),
            coalesce=self._coalesce,
        )
        dead, self._links[number] = self._links[number], link
        link.start()
        if dead is not None:
            dead.close()
        if self._closing:
            link.close()
        else:
            self._on_open(number)

    def _linked(self, number: int) -> EngineLink:
        link = self._links[number]
        if link is None:
            raise _loading()
        return link

    def _ended(self, number: int) -> None:
        if not self._closing:
            self._choice.forget(number)  # its successor's cache is empty
            self._tell(number, StepLoad(0))
            self._connectors[number].lost()

    def _tell(self, number: int, new: KVCacheStats | StepLoad) -> None:
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
