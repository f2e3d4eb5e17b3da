"""Loop of an engine that computes when it is told to: messages, a step, what it made, and again."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable
from typing import Any

from cog_triton.engines.base import StepEngine
from cog_triton.engines.engine_orders import Stop
from cog_triton.engines.engine_server import EngineServer
from cog_triton.ipc.connection import Connection
from cog_triton.system.shared_time import SharedTime


def run_engine(engine: StepEngine, control: Connection, progress: SharedTime) -> None:
    """Serve `engine` from when `control` brings `Serve`, until it brings `Stop`.

    `progress` is set to when the next step is due. Raises EOFError or OSError when the process at
    the other end of `control` is gone.
    """
    loop = _StepLoop(engine, control, progress)
    try:
        loop.run()
    finally:
        loop.server.close()


class _Poller:
    """Descriptors to wait for, with microseconds, which poll and epoll round up to milliseconds."""

    def __init__(self) -> None:
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self.add_reader = self._readers.__setitem__
        self.add_writer = self._writers.__setitem__
        self.remove_reader = lambda descriptor: self._readers.pop(descriptor, None)
        self.remove_writer = lambda descriptor: self._writers.pop(descriptor, None)

    def wait(self, seconds: float | None) -> bool:
        """Wait, then call back for all that is ready; returns whether anything could be read."""
        readable, writable, _ = select.select(list(self._readers), list(self._writers), [], seconds)
        for ready, callbacks in ((readable, self._readers), (writable, self._writers)):
            for descriptor in ready:
                if (callback := callbacks.get(descriptor)) is not None:
                    callback()
        return bool(readable)


class _StepLoop:
    def __init__(self, engine: StepEngine, control: Connection, progress: SharedTime) -> None:
        self._engine = engine
        self._progress = progress
        self._progressed = True
        self._closed = False
        self._poller = _Poller()
        self.server = EngineServer(engine, self._poller, control, self._obey)

    def run(self) -> None:
        engine, server, poller = self._engine, self.server, self._poller
        while True:
            held = engine.waits_for_readers and server.is_behind
            wait = None if held else engine.wait_s()
            self._tell_due(wait, held=held)
            while poller.wait(wait) and not self._closed:
                wait = 0.0
            if self._closed:
                return
            if not held:
                self._tell_due(0.0, held=False)
                for number, event in engine.step():
                    self._progressed = True
                    server.emit(number, event)
            server.flush()
            server.tell_stats()

    def _obey(self, order: Any) -> None:
        if isinstance(order, Exception):
            raise order
        self._closed = isinstance(order, Stop)

    def _tell_due(self, wait: float | None, *, held: bool) -> None:
        """Tell when the step after `wait` is due: with requests that run there must be one.

        A step that is overdue stays so until one brings an event, whatever messages come.
        """
        if held or not self.server.running:
            self._progress.set(math.inf)
            self._progressed = True
        elif wait or self._progressed:
            self._progress.set(time.monotonic() + (wait or 0.0))
            self._progressed = False
