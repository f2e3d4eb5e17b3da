"""Mock engine: emits every stream's tokens when they are due; run by the engine process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry
from cog_triton.engines.base import options_of
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.mock_directory import MockModel, read_model
from cog_triton.engines.mock.mock_request import MockOptions, MockRequest
from cog_triton.engines.mock.scheduler import Scheduler, StepClock
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import InvalidArgument

_MIN_WAIT_S = 0.001
"""Shortest time between two timed wake-ups, so that many streams share one."""


class MockEngine:
    """Mock engine; see `cog_triton.engines.base.StepEngine`.

    At an unlimited rate it makes what its readers take, and no more.
    """

    def __init__(
        self,
        model: MockModel,
        options: MockOptions,
        clock: Callable[[], float] = time.monotonic,
        registry: AdapterRegistry | None = None,
    ) -> None:
        """`registry` has the adapters: with one of rank r the text begins r tokens later."""
        self._registry = registry
        self.max_batch_size = options.max_batch_size
        self.waits_for_readers = options.is_flat_out
        kind = StepClock if options.step_ms else Scheduler
        self._scheduler = kind(model, options, self._inject, clock)
        self._clock = clock
        self._events: list[tuple[int, TokenEvent]] = []
        self._hangs = self._dies = False
        self._woken = 0.0

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Open the engine that a rendered model's parameters describe."""
        registry = AdapterRegistry(Path(parameters[REGISTRY])) if REGISTRY in parameters else None
        model = read_model(Path(parameters["engine_dir"]))
        return cls(model, MockOptions.parse(options_of(parameters)), registry=registry)

    def wait_s(self) -> float | None:
        """See `StepEngine.wait_s`."""
        if self._events or self._dies:
            return 0.0
        due = None if self._hangs else self._scheduler.next_due()
        if due is None:
            return None
        now = self._clock()
        return max(due, self._woken + _MIN_WAIT_S) - now if due > now else 0.0

    def submit(self, handle: int, request: MockRequest) -> None:
        """See `StepEngine.submit`; a `MockRequest`."""
        start = len(request.made)
        if request.adapter is not None:
            if self._registry is None:
                raise InvalidArgument("lora_name: this server has no LoRA adapters")
            start += self._registry.find(request.adapter).rank
        if not self._hangs:
            self._scheduler.submit(handle, request, start)

    def cancel(self, handle: int) -> None:
        """See `StepEngine.cancel`."""
        if not self._hangs and self._scheduler.cancel(handle):
            self._events.append((handle, TokenEvent([], [], "cancelled")))

    def step(self) -> list[tuple[int, TokenEvent]]:
        """See `StepEngine.step`; the events that are due, none once it hangs."""
        if self._dies:  # now that the tokens from before it are sent
            os.kill(os.getpid(), signal.SIGKILL)
        if self._hangs:
            return []
        events, self._events = self._events, []
        self._woken = self._clock()
        for event in self._scheduler.due():
            events.append(event)
            if self._hangs or self._dies:
                break
        return events

    def kv_cache(self) -> KVCacheStats:
        """See `StepEngine.kv_cache`."""
        return self._scheduler.kv_cache()

    def _inject(self, how: str) -> None:
        self._dies = how == "crash"
        self._hangs = not self._dies
