"""Engine fleet: the engine processes of one server, each at a fixed address.

An engine listens once it is loaded. When it dies, another takes its address as soon as its memory
is free: a spare that is asleep, or a new process, with backoff. Clients connect again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cog_triton.engines.engine_spec import numbered
from cog_triton.errors import EngineNotParked, EngineNotRestored
from cog_triton.processes.engine_child import EngineChild
from cog_triton.processes.orders import EngineDeath, EnginesChanged, StartEngines
from cog_triton.processes.restarts import FIRST_PAUSE_S, STABLE_S, Restarts
from cog_triton.system.host_memory import resident_bytes

_log = logging.getLogger(__name__)
_LOGS_KEPT = 3
_SPARE_DELAY_S = 5.0  # after a death, whose generations need the CPU for their prompts first


class EngineFleet:
    """Engine processes of an order, with its files in one directory; in one event loop."""

    def __init__(self, order: StartEngines, report: Callable[[Any], None]) -> None:
        """Start to load the engines. `report` takes EnginesChanged and EngineDeath."""
        self.order = order
        self._report = report
        self._has_spare = order.spare
        self._spec = order.spec.parkable() if order.spare else order.spec
        self._addresses = numbered(order.address, order.count)
        self._generations = [0] * order.count
        self._numbers = itertools.count(1)
        self._logs: deque[Path] = deque()
        self._living: set[EngineChild] = set()
        self._serving: dict[int, EngineChild] = {}
        self._spare: asyncio.Task[EngineChild | None] | None = None
        self._spare_taken: asyncio.Future[None]
        self._tasks = [asyncio.ensure_future(self._run(replica)) for replica in range(order.count)]

    @property
    def has_failed(self) -> bool:
        """Whether an engine did not load, and is not tried again."""
        return any(task.done() for task in self._tasks)

    def state(self) -> EnginesChanged:
        """The engines of now."""
        serving = {engine.process.pid for engine in self._serving.values()}
        others = {engine.process.pid for engine in self._living} - serving
        generations = {replica: self._generations[replica] for replica in self._serving}
        return EnginesChanged(generations, sorted(serving), sorted(others))

    def end(self, reason: str, replica: int | None = None) -> None:
        """End an engine that serves, or all, for a fault; their deaths are reported."""
        for number, engine in tuple(self._serving.items()):
            if replica in (None, number):
                engine.end(reason)

    async def stop(self, *, kills: bool = False) -> None:
        """End all engines, in time or killed; no process of theirs is left."""
        for task in (*self._tasks, self._spare):
            if task is not None:
                task.cancel()
        ends = (engine.close(kills=kills) for engine in self._living)
        await asyncio.gather(*ends, return_exceptions=True)

    def hurry(self) -> None:
        """End at once what `stop` waits for."""
        for engine in self._living:
            engine.end("the engine was closed")

    async def _run(self, replica: int) -> None:
        restarts, first = Restarts(), True
        while True:
            engine, lasted = await self._load(replica, first=first), 0.0
            if not isinstance(engine, str):
                first = False
                lasted = await self._serve(replica, engine)
            elif first or not self._serving:
                reason = f"the engine did not load: {engine}"
                self._report(EngineDeath(reason, replica, len(self._serving)))
                return
            else:
                _log.error("engine %d is not back, and is tried again: %s", replica, engine)
            restarts.failed(stable=lasted >= STABLE_S)
            await asyncio.sleep(restarts.pause)

    async def _serve(self, replica: int, engine: EngineChild) -> float:
        """Have an engine serve, until it has died and its memory is free; returns the seconds."""
        began = time.monotonic()
        self._note(replica, "engine process %d serves", engine.number)
        self._generations[replica] += 1
        engine.serve(self._addresses[replica], self._generations[replica])
        self._serving[replica] = engine
        if self._has_spare and self._spare is None:
            self._begin_spare(delay=_SPARE_DELAY_S if self._logs else 0.0)
        self._report(self.state())
        reason = await engine.wait_until_dead()
        del self._serving[replica]
        lasted = time.monotonic() - began
        self._report(self.state())
        self._report(EngineDeath(reason, replica, len(self._serving), lasted))
        await self._clean_up(engine)
        return lasted

    async def _load(self, replica: int, *, first: bool) -> EngineChild | str:
        engine = await self._take_spare() or await self._begin(replica)
        parks = first and self._has_spare and self._spec.is_spare_first
        if isinstance(engine, str) or not parks:
            return engine
        if not await self._park(engine):
            return engine if await self._wake(engine) else await self._begin(replica)
        beside = await self._begin(replica)
        if not isinstance(beside, str):
            self._begin_spare(engine)
            return beside
        _log.warning("no engine beside the spare, which serves: %s", beside)
        return engine if await self._wake(engine) else beside

    async def _begin(self, replica: int) -> EngineChild | str:
        order = self.order
        gpus = order.gpus[replica] if order.gpus else None
        began, number = time.monotonic(), next(self._numbers)
        on = "" if gpus is None else f" on GPU {gpus}"
        self._note(replica, "engine process %d starts%s: %s", number, on, self._spec.engine)
        try:
            directory = Path(order.directory)
            engine = EngineChild(number, self._spec, directory, order.environment, gpus)
        except OSError as error:
            return str(error)
        self._living.add(engine)
        self._report(self.state())
        if why := await engine.load():
            await self._clean_up(engine)
            return why
        seconds = time.monotonic() - began
        self._note(replica, "engine process %d has loaded in %.2f s", number, seconds)
        return engine

    def _note(self, replica: int, text: str, *values: object) -> None:
        """Log a stage of a start, below INFO for the first one, which the server reports itself."""
        _log.log(logging.INFO if self._generations[replica] else logging.DEBUG, text, *values)

    async def _clean_up(self, engine: EngineChild) -> None:
        ending = None
        while ending is None:
            try:
                ending = await engine.clean_up()
            except OSError as error:  # it survives, or no descriptor is left
                _log.error("engine process %d is still there: %s", engine.number, error)
                await asyncio.sleep(FIRST_PAUSE_S)
        _log.info("engine process %d %s (log: %s)", engine.number, ending, engine.log)
        self._living.discard(engine)
        self._report(self.state())
        self._logs.append(engine.log)
        while len(self._logs) > _LOGS_KEPT:
            self._logs.popleft().unlink(missing_ok=True)

    def _begin_spare(self, engine: EngineChild | None = None, delay: float = 0.0) -> None:
        self._spare_taken = asyncio.get_running_loop().create_future()
        self._spare = asyncio.ensure_future(self._stand_by(engine, delay))

    async def _stand_by(self, engine: EngineChild | None, delay: float) -> EngineChild | None:
        """Have a spare ready, and another when it dies, until one is taken; returns that."""
        while self._has_spare:
            if engine is None:
                await asyncio.wait({self._spare_taken}, timeout=delay)
                loaded = await self._begin(0)
                if isinstance(loaded, str):
                    _log.warning("no spare engine: %s", loaded)
                    return None
                engine = loaded
                if not self._spare_taken.done():
                    await self._park(engine)
            signs = {self._spare_taken, engine.ended}
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            if self._spare_taken.done():
                return engine
            await self._clean_up(engine)
            engine, delay = None, _SPARE_DELAY_S
        return None

    async def _take_spare(self) -> EngineChild | None:
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        self._spare_taken.set_result(None)
        engine = await spare
        return engine if engine is not None and await self._wake(engine) else None

    async def _park(self, engine: EngineChild) -> bool:
        if not self._spec.is_parkable:
            _log.info("spare engine %d is ready", engine.number)
            return False
        began = time.monotonic()
        try:
            await engine.fall_asleep()
        except EngineNotParked as error:
            _log.warning("spare engine %d stays on the GPU: %s", engine.number, error)
        except EngineNotRestored as error:
            self._has_spare = False  # the next one would fare no better
            engine.end(error.detail)
            _log.error("no spare engine any more: %s", error)
        else:
            seconds, size = time.monotonic() - began, resident_bytes(engine.process.pid) / 1e9
            text = f"asleep in {seconds:.1f} s, it has {size:.1f} GB of host memory"
            _log.info("spare engine %d is parked: %s", engine.number, text)
        return engine.asleep

    async def _wake(self, engine: EngineChild) -> bool:
        """Take an engine back to the GPU if it sleeps; one that fails is ended."""
        began = time.monotonic()
        try:
            if engine.asleep:
                await engine.wake_up()
                seconds = time.monotonic() - began
                _log.info("engine %d is back in %.2f s", engine.number, seconds)
        except (EngineNotParked, EngineNotRestored) as error:
            engine.end(error.detail)
            _log.error("spare engine %d does not wake up: %s", engine.number, error)
        if engine.alive:
            return True
        await self._clean_up(engine)
        return False
