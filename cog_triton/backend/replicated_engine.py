"""Replicated engine: a `TokenEngine` of several leased ones, each request on one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cog_triton.backend.leased_engine import LeasedEngine
from cog_triton.engines.base import EngineStats, TokenEngine
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.replica_choice import ReplicaChoice
from cog_triton.keeper.engine_lease import keeper_name, replica_count
from cog_triton.keeper.keeper_messages import EngineSpec


def engine_opener(engine: str) -> Callable[[Mapping[str, str]], TokenEngine]:
    """An `open_engine` for `make_token_model`; `engine` is ``module:class``."""

    def open_engine(parameters: Mapping[str, str]) -> TokenEngine:
        spec, owner, count = EngineSpec.of(engine, parameters), os.getppid(), replica_count()
        if count == 1:
            return LeasedEngine(keeper_name(), spec, owner)
        return ReplicatedEngine(keeper_name(), spec, owner, count)

    return open_engine


class ReplicatedEngine:
    """Several engines of one model, leased to this stub; see `TokenEngine`.

    Requests go to engines that are there. When one dies its requests end with E2105; it is leased
    again while the others serve.
    """

    def __init__(self, keeper: str, spec: EngineSpec, owner: int, count: int) -> None:
        """Waits for all of them; raises what `LeasedEngine` does, and has none then."""
        self._engines: list[LeasedEngine] = []
        self._choice = ReplicaChoice()
        self._told: dict[int, KVCacheStats] = {}
        self._gone: KVCacheStats | None = None

        def lease(replica: int) -> LeasedEngine:
            return LeasedEngine(
                keeper, spec, owner, replica, lambda: any(one.serves for one in self._engines)
            )

        with ThreadPoolExecutor(count) as pool:
            leasing = [pool.submit(lease, replica) for replica in range(count)]
        leased = [one.result() for one in leasing if one.exception() is None]
        if len(leased) < count:
            for engine in leased:
                engine.close()
            raise next(error for one in leasing if (error := one.exception()) is not None)
        self._engines = leased

    @property
    def on_kv_cache(self) -> Callable[[], None]:
        """See `TokenEngine.on_kv_cache`."""
        return self._engines[0].on_kv_cache

    @on_kv_cache.setter
    def on_kv_cache(self, function: Callable[[], None]) -> None:
        for engine in self._engines:
            engine.on_kv_cache = function

    def submit(self, handle: int, request: Any, emit: Callable[[Any], None]) -> None:
        """See `TokenEngine.submit`."""
        loads = {
            number: engine.stats().active
            for number, engine in enumerate(self._engines)
            if engine.serves
        }
        chosen = self._choice.choose(request.input_ids, loads or {0: 0}, request.adapter)
        self._engines[chosen].submit(handle, request, emit)

    def cancel(self, handle: int) -> None:
        """See `TokenEngine.cancel`."""
        for engine in self._engines:
            engine.cancel(handle)

    def stats(self) -> EngineStats:
        """See `TokenEngine.stats`: sums."""
        stats = [engine.stats() for engine in self._engines]
        return EngineStats(
            sum(one.active for one in stats),
            sum(one.waiting for one in stats),
            sum(one.max_batch_size for one in stats),
            self._kv_cache(),
        )

    def close(self) -> None:
        """See `TokenEngine.close`."""
        for engine in self._engines:
            engine.close()

    def _kv_cache(self) -> KVCacheStats | None:
        """Statistics of all caches; counters go on when an engine is replaced."""
        for number, engine in enumerate(self._engines):
            new, old = engine.stats().kv_cache, self._told.get(number)
            if new is None:
                continue
            if old is not None and (new.prefix_queries or 0) < (old.prefix_queries or 0):
                self._gone = KVCacheStats.of_engines([old, *([self._gone] if self._gone else [])])
            self._told[number] = new
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
