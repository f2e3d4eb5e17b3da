"""Step engines without a model, for tests of the engine process."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import EngineCorrupt, InvalidArgument

ENGINE = "step_engines:CountingEngine"
REFUSED = 13
BROKEN = 66
HUGE = 99
HANGING = 44
TORN = 55


class CountingEngine:
    """Answers a prompt with its first id plus 1, 2, 3 and so on, one token a step.

    A prompt that starts with REFUSED is refused, with BROKEN ends the process in an exception of
    the engine's own, with TORN before any step, with HUGE gets a million tokens at once, with
    HANGING sleeps for ever in a step. The child's pid is written to the file that the parameter
    ``pid_file`` names; with the parameter ``leaves`` it has a child that ignores SIGTERM.
    """

    waits_for_readers = True
    has_kv_cache = False

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self._live: dict[int, EngineRequest] = {}
        self._made: dict[int, int] = {}
        self._events: list[tuple[int, TokenEvent]] = []

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        if "pid_file" in parameters:
            Path(parameters["pid_file"]).write_text(str(os.getpid()))
        if "leaves" in parameters:
            subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 600"])
        if "corrupt" in parameters:
            raise EngineCorrupt(f"{parameters['corrupt']}: torn in two")
        engine = cls(int(parameters["max_batch_size"]))
        engine.has_kv_cache = "kv_cache" in parameters
        return engine

    def wait_s(self) -> float | None:
        return 0.0 if self._live or self._events else None

    def submit(self, handle: int, request: EngineRequest) -> None:
        if request.input_ids[0] == REFUSED:
            raise InvalidArgument(f"input_ids: holds {REFUSED}; it brings bad luck")
        if request.input_ids[0] == TORN:
            raise ZeroDivisionError("the engine broke")
        self._live[handle] = request
        self._made[handle] = 0

    def cancel(self, handle: int) -> None:
        if self._live.pop(handle, None) is not None:
            self._events.append((handle, TokenEvent([], [], "cancelled")))

    def kv_cache(self) -> KVCacheStats | None:
        return KVCacheStats(len(self._live) / 1000) if self.has_kv_cache else None

    def step(self) -> list[tuple[int, TokenEvent]]:
        for handle, request in list(self._live.items())[: self.max_batch_size]:
            first = request.input_ids[0]
            if first == HANGING:
                time.sleep(600)
            if first == BROKEN:
                raise ZeroDivisionError("the engine broke")
            self._made[handle] += 1
            tokens = [first + self._made[handle]] * (10**6 if first == HUGE else 1)
            ended = self._made[handle] >= request.sampling.max_tokens
            if ended:
                del self._live[handle]
            self._events.append((handle, TokenEvent(tokens, [], "length" if ended else None)))
        events, self._events = self._events, []
        return events
