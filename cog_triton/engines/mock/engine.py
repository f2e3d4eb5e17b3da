"""Mock engine: one thread that emits every stream's tokens when they are due."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self

from cog_triton.engines.base import EngineStats
from cog_triton.engines.mock.mock_directory import MockModel, read_model
from cog_triton.engines.mock.mock_options import MockOptions
from cog_triton.engines.mock.mock_request import MockRequest
from cog_triton.engines.mock.scheduler import Scheduler
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import CogTritonError

_MIN_WAIT_S = 0.001
"""Shortest time between two timed wake-ups, so that many streams share one."""


class MockEngine:
    """Mock engine inside Triton's stub; see `cog_triton.engines.base.TokenEngine`.

    In a process of its own every token would cross one more process, which the mock is not there
    to measure.
    """

    def __init__(self, model: MockModel, options: MockOptions) -> None:
        self._max_batch_size = options.max_batch_size
        self._scheduler = Scheduler(model, options, self._inject)
        self._emitters: dict[int, Callable[[TokenEvent], None]] = {}
        # Workaround: SimpleQueue waits forever if its timeout has passed before it begins to wait.
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._hangs = False
        self._woken = 0.0
        self._thread = threading.Thread(target=self._main, name="mock-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Open the engine that a rendered model's parameters describe."""
        options = {name: value for name, value in parameters.items() if name != "engine_dir"}
        return cls(read_model(Path(parameters["engine_dir"])), MockOptions.parse(options))

    def submit(self, handle: int, request: Any, emit: Callable[[TokenEvent], None]) -> None:
        """See `TokenEngine.submit`; the request is a `MockRequest`."""
        self._emitters[handle] = emit
        self._inbox.put(lambda: self._submit(handle, request))

    def cancel(self, handle: int) -> None:
        """See `TokenEngine.cancel`."""
        self._inbox.put(lambda: self._cancel(handle))

    def stats(self) -> EngineStats:
        """See `TokenEngine.stats`."""
        return EngineStats(len(self._emitters), self._scheduler.waiting, self._max_batch_size)

    def close(self) -> None:
        """See `TokenEngine.close`."""
        self._inbox.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            self._run()
        except BaseException:  # noqa: BLE001 - a stub without its engine would look healthy
            traceback.print_exc()
            os._exit(1)

    def _run(self) -> None:
        while True:
            try:
                message = self._inbox.get(timeout=self._wait_s())
            except queue.Empty:
                self._woken = time.monotonic()
                self._send()
                continue
            if message is None:
                return
            if not self._hangs:
                message()

    def _wait_s(self) -> float | None:
        """Seconds until the next event is due, None while only a message can bring one."""
        due = None if self._hangs else self._scheduler.next_due()
        if due is None:
            return None
        now = time.monotonic()
        return max(due, self._woken + _MIN_WAIT_S) - now if due > now else 0.0

    def _send(self) -> None:
        for handle, event in self._scheduler.due():
            if self._hangs:
                return
            self._emit(handle, event)

    def _emit(self, handle: int, event: TokenEvent) -> None:
        ended = event.finish is not None or event.error is not None
        (self._emitters.pop if ended else self._emitters.__getitem__)(handle)(event)

    def _submit(self, handle: int, request: MockRequest) -> None:
        try:
            self._scheduler.submit(handle, request)
        except CogTritonError as error:
            self._emit(handle, TokenEvent([], [], error=error))

    def _cancel(self, handle: int) -> None:
        if self._scheduler.cancel(handle):
            self._emit(handle, TokenEvent([], [], "cancelled"))

    def _inject(self, how: str) -> None:
        if how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        self._hangs = True
