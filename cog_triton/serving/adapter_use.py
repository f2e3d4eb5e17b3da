"""Adapter use: which LoRA adapters have requests, running or waiting, for metrics and routers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set

from cog_triton.serving.generation import GenerationRequest, GenerationResult

OnChange = Callable[[Set[str], Set[str]], None]


class AdapterUse:
    """Requests with an adapter, from their arrival to their end; thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, GenerationResult]] = {}
        self._lock = threading.Lock()
        self.on_change: OnChange = lambda running, waiting: None
        """Called with the adapters of running and of waiting requests, on any thread."""

    def enter(self, request: GenerationRequest, result: GenerationResult) -> None:
        """A request arrived, and waits until `admitted`."""
        adapter = request.engine.adapter
        if adapter is not None:
            with self._lock:
                self._requests[id(result)] = adapter, result
                self._report()

    def admitted(self, result: GenerationResult) -> None:
        """A request got its turn: `result` has its queue time."""
        if id(result) in self._requests:
            with self._lock:
                self._report()

    def leave(self, result: GenerationResult) -> None:
        """A request ended."""
        if id(result) in self._requests:
            with self._lock:
                del self._requests[id(result)]
                self._report()

    def _report(self) -> None:
        running: set[str] = set()
        waiting: set[str] = set()
        for name, result in self._requests.values():
            (waiting if result.queue_time is None else running).add(name)
        self.on_change(running, waiting)
