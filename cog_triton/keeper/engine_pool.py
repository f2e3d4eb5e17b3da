"""Engine pool: which engine processes there are, and who has a lease of one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cog_triton.errors import CogTritonError, EngineNotParked, EngineNotRestored
from cog_triton.keeper.engine_parking import EngineParking
from cog_triton.keeper.keeper_messages import EngineDied, EnginesKept, EngineSpec
from cog_triton.keeper.kept_engine import EngineState, KeptEngine

_log = logging.getLogger(__name__)
_LOGS_KEPT = 3
_SPARE_DELAY_S = 5.0  # after a death, whose generations need the CPU for their prompts first

Tell = Callable[[EngineDied], None]


class EngineNotLoaded(Exception):
    """An engine ended before it was loaded; `error` says why."""

    def __init__(self, error: CogTritonError | str) -> None:
        super().__init__(str(error))
        self.error = error


class EnginePool:
    """Engine processes of one keeper; each has at most one lease at a time.

    With a spare, another one is kept ready beside each that is leased: parked, where its family
    can be.
    """

    def __init__(
        self, start: Callable[[EngineSpec], KeptEngine], tell: Tell, *, spare: bool = False
    ) -> None:
        """`start` starts an engine process; `tell` is told of each death."""
        self._start = start
        self._tell = tell
        self._spare = spare
        self._parking = EngineParking()
        self._engines: list[KeptEngine] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs: deque[Path] = deque()
        self._closing = asyncio.Event()
        self._spare_wanted = asyncio.Event()
        self._ahead: KeptEngine | None = None
        if spare:
            self._go_on(self._keep_spare())

    async def begin_ahead(self, spec: EngineSpec) -> None:
        """Have an engine load for the first lease of its kind; no-op where there are engines."""
        if not self._engines:
            self._ahead = await self._begin(spec)
            self._ahead.claimed = True

    async def lease(self, spec: EngineSpec) -> KeptEngine:
        """Lease an engine that is ready, else one that has to load first.

        Raises EngineNotLoaded when that ends.
        """
        for engine in self._engines:
            if engine.spec != spec and engine.state is not EngineState.LEASED:
                engine.kill("another engine is asked for")
        await self._parking.settled()  # an engine that is being parked is to be had then
        while (free := self._free(spec)) is not None:
            if await self._taken(free):
                return free
        ahead, self._ahead = self._ahead, None
        engine = ahead if ahead is not None and ahead.spec == spec else await self._begin(spec)
        if self._spare and spec.is_spare_first:
            engine = await self._after_spare(engine)
        if await self._taken(engine):
            return engine
        raise EngineNotLoaded(engine.load_error())

    def release(self, engine: KeptEngine) -> None:
        """End a lease: the engine, which has dropped its peers' requests, can be leased again."""
        if engine.state is EngineState.LEASED:
            engine.state = EngineState.READY

    def engine(self, number: int) -> KeptEngine | None:
        """The engine process of this number, unless it has ended."""
        return next((engine for engine in self._engines if engine.number == number), None)

    def kept(self) -> EnginesKept:
        """The engines that live, by whether they are leased."""
        spares = self._in(EngineState.LOADING) + self._in(EngineState.READY)
        return EnginesKept(
            tuple(engine.root_pid for engine in self._in(EngineState.LEASED)),
            tuple(engine.root_pid for engine in spares),
        )

    def kill_leased(self, reason: str, replica: int | None = None) -> None:
        """Kill the engines that are at work, or the one of them that is leased as `replica`."""
        for engine in self._in(EngineState.LEASED):
            if replica in (None, engine.replica):
                engine.kill(reason)

    def free_gpus(self, shares: Sequence[str]) -> str | None:
        """The first of these shares of the GPUs that no living engine has; None without any."""
        taken = [one.gpus for one in self._engines if one.state is not EngineState.DEAD]
        return next((share for share in shares if share not in taken), None)

    async def close(self) -> None:
        """End all engines."""
        self._spare = False
        self._closing.set()
        self._spare_wanted.set()
        await asyncio.gather(*(engine.close() for engine in self._engines))
        await asyncio.gather(*self._tasks)

    def _in(self, state: EngineState) -> list[KeptEngine]:
        return [engine for engine in self._engines if engine.state is state]

    def _free(self, spec: EngineSpec) -> KeptEngine | None:
        """An engine that nobody has or waits for; the one that is ready first, on the GPU best."""
        ready = sorted(self._in(EngineState.READY), key=lambda engine: engine.parked is not None)
        for engine in (*ready, *self._in(EngineState.LOADING)):
            if engine.spec == spec and not engine.claimed:
                return engine
        return None

    async def _taken(self, engine: KeptEngine) -> bool:
        """Wait for an engine and lease it; whether it has loaded, or is back from where it was."""
        engine.claimed = True
        try:
            await engine.wait_until_loaded()
            if engine.state is EngineState.READY and engine.parked:
                await self._wait_for_dead()
                # Once begun it goes on, though whoever asked for the engine has gone.
                await asyncio.shield(asyncio.ensure_future(self._unpark(engine)))
        finally:
            engine.claimed = False
        if engine.state is EngineState.DEAD:
            return False
        engine.state = EngineState.LEASED
        self._spare_wanted.set()
        return True

    async def _begin(self, spec: EngineSpec) -> KeptEngine:
        await self._wait_for_dead()
        engine = self._start(spec)
        self._engines.append(engine)
        self._go_on(self._follow(engine))
        return engine

    async def _wait_for_dead(self) -> None:
        """Wait until what has died is gone: before, a GPU's memory is not free."""
        for engine in self._in(EngineState.DEAD):
            await engine.wait_until_cleaned_up()

    async def _follow(self, engine: KeptEngine) -> None:
        reason = await engine.wait_until_dead()
        serving = len(self._in(EngineState.LEASED))
        self._tell(EngineDied(reason, engine.was_leased, engine.replica, serving))
        _log.info("engine process %d %s", engine.number, await engine.clean_up())
        self._engines.remove(engine)
        self._logs.append(engine.log)
        while len(self._logs) > _LOGS_KEPT:
            self._logs.popleft().unlink(missing_ok=True)
        if not engine.was_leased and engine.load_s:
            self._spare_wanted.set()

    async def _keep_spare(self) -> None:
        """Make a spare, unless there is one, whenever an engine was leased or a spare has died."""
        while await self._spare_wanted.wait():
            self._spare_wanted.clear()
            if self._logs or self._in(EngineState.DEAD):
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _SPARE_DELAY_S)
            if self._closing.is_set():
                return
            if (spec := self._without_spare()) is not None:
                await self._make_spare(spec)

    def _without_spare(self) -> EngineSpec | None:
        """An engine that is leased, and has no other beside it."""
        others = self._in(EngineState.LOADING) + self._in(EngineState.READY)
        leased = {engine.spec: None for engine in self._in(EngineState.LEASED)}
        specs = leased.keys() - {engine.spec for engine in others}
        return next(iter(specs), None) if self._spare else None

    async def _make_spare(self, spec: EngineSpec) -> None:
        engine = await self._begin(spec)
        await engine.wait_until_loaded()
        if engine.state is EngineState.DEAD and self._spare:
            _log.warning("no spare engine: %s", engine.load_error())
        elif engine.state is EngineState.READY and not engine.claimed:
            await self._park(engine)

    async def _after_spare(self, spare: KeptEngine) -> KeptEngine:
        """Park `spare`, so that another can load; returns that, or `spare` where it must do."""
        spare.claimed = True
        try:
            await spare.wait_until_loaded()
            if spare.state is EngineState.DEAD or not await self._park(spare):
                return spare
        finally:
            spare.claimed = False
        engine = await self._begin(spare.spec)
        await engine.wait_until_loaded()
        if engine.state is EngineState.DEAD:
            _log.warning("no engine beside the spare, which serves: %s", engine.load_error())
            return spare
        return engine

    async def _park(self, engine: KeptEngine) -> bool:
        """Park a spare, if its family can be; returns whether it is parked."""
        if not engine.spec.is_parkable:
            _log.info("spare engine %d is ready", engine.number)
            return False
        try:
            parked = await self._parking.park(engine)
        except EngineNotParked as error:
            _log.warning("spare engine %d stays on the GPU: %s", engine.number, error)
            return False
        except EngineNotRestored as error:
            self._spare = False  # the next one would fare no better
            engine.kill(error.detail)
            _log.error("no spare engine any more: %s", error)
            return False
        _log.info("spare engine %d is parked: %s", engine.number, parked)
        return True

    async def _unpark(self, engine: KeptEngine) -> None:
        try:
            seconds = await self._parking.unpark(engine)
            _log.info("engine %d is back in %.2f s", engine.number, seconds)
        except (EngineNotParked, EngineNotRestored) as error:
            engine.kill(error.detail)

    def _go_on(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
