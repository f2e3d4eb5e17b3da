"""Adapter use: which LoRA adapters have requests, running or waiting, for metrics and routers."""

from __future__ import annotations

from typing import NamedTuple

from cog_triton.serving.generation import GenerationRequest, GenerationResult


class AdapterCounts(NamedTuple):
    """Requests by adapter: those that the engine has, and those that wait for their turn."""

    running: dict[str, int]
    waiting: dict[str, int]


class AdapterUse:
    """Requests with an adapter, from their arrival to their end; thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, GenerationResult]] = {}

    def enter(self, request: GenerationRequest, result: GenerationResult) -> None:
        """A request arrived; `result` tells when it is admitted."""
        if request.adapter is not None:
            self._requests[id(result)] = request.adapter, result

    def leave(self, result: GenerationResult) -> None:
        """A request ended."""
        self._requests.pop(id(result), None)

    def counts(self) -> AdapterCounts:
        """The counts now."""
        counts = AdapterCounts({}, {})
        for name, result in tuple(self._requests.values()):
            group = counts.waiting if result.queue_time is None else counts.running
            group[name] = group.get(name, 0) + 1
        return counts
