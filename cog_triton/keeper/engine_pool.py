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
        self._planned: set[EngineSpec] = set()
        self._closing = asyncio.Event()
        self._roused = asyncio.Event()
        self._roused.set()

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
        engine = await self._begin(spec)
        if self._spare and spec.is_spare_first:
            engine = await self._after_spare(engine)
        if await self._taken(engine):
            return engine
        raise EngineNotLoaded(engine.load_error())

    async def rest(self) -> None:
        """Park the engines that are leased, and start none, until `rouse`; leases stay.

        Those whose family cannot be parked stay as they are. Raises E2110 for an engine that stays
        on the GPU, and then all is as before.
        """
        self._roused.clear()
        for engine in [one for one in self._engines if one.state is EngineState.LEASED]:
            if not engine.spec.is_parkable:
                continue
            try:
                _log.info("engine %d rests: %s", engine.number, await self._parking.park(engine))
                engine.state = EngineState.LEASED
            except EngineNotParked:
                await self.rouse()
                raise
            except EngineNotRestored as error:
                engine.kill(error.detail)
        await self._wait_for_dead()

    async def rouse(self) -> None:
        """Take leased engines back that rest; one that does not come back is replaced."""
        for engine in [one for one in self._engines if self._parking.parked(one)]:
            if engine.state is EngineState.LEASED:
                await self._unpark(engine)
            if engine.state is EngineState.READY:
                engine.state = EngineState.LEASED
        self._roused.set()

    def release(self, engine: KeptEngine) -> None:
        """End a lease: the engine, which has dropped its peers' requests, can be leased again."""
        if engine.state is EngineState.LEASED:
            engine.state = EngineState.READY

    def engine(self, number: int) -> KeptEngine | None:
        """The engine process of this number, unless it has ended."""
        return next((engine for engine in self._engines if engine.number == number), None)

    def kept(self) -> EnginesKept:
        """The engines that live, by whether they are leased."""
        alive = [one for one in self._engines if one.state is not EngineState.DEAD]
        leased = [one.root_pid for one in alive if one.state is EngineState.LEASED]
        spare = [one.root_pid for one in alive if one.state is not EngineState.LEASED]
        return EnginesKept(tuple(leased), tuple(spare))

    def kill_leased(self, reason: str, replica: int | None = None) -> None:
        """Kill the engines that are at work, or the one of them that is leased as `replica`."""
        for engine in self._engines:
            if engine.state is EngineState.LEASED and replica in (None, engine.replica):
                engine.kill(reason)

    def free_gpus(self, shares: Sequence[str]) -> str | None:
        """The first of these shares of the GPUs that no living engine has; None without any."""
        taken = [one.gpus for one in self._engines if one.state is not EngineState.DEAD]
        return next((share for share in shares if share not in taken), None)

    async def close(self) -> None:
        """End all engines."""
        self._spare = False
        self._closing.set()
        for engine in self._engines:
            if self._parking.parked(engine):
                engine.kill("the engine was closed")  # it cannot end by itself
        await asyncio.gather(*(engine.close() for engine in self._engines))
        await asyncio.gather(*self._tasks)
        self._parking.close()

    def _free(self, spec: EngineSpec) -> KeptEngine | None:
        """An engine that nobody has or waits for; the one that is ready first."""
        order = (EngineState.READY, EngineState.PARKED, EngineState.LOADING)
        free = [
            engine
            for engine in self._engines
            if engine.spec == spec and not engine.claimed and engine.state in order
        ]
        return min(free, key=lambda engine: order.index(engine.state), default=None)

    async def _taken(self, engine: KeptEngine) -> bool:
        """Wait for an engine and lease it; whether it has loaded, or is back from where it was."""
        engine.claimed = True
        try:
            await engine.wait_until_loaded()
            if engine.state is EngineState.PARKED:
                await self._wait_for_dead()
                # Once begun it goes on, though whoever asked for the engine has gone.
                await asyncio.shield(asyncio.ensure_future(self._unpark(engine)))
        finally:
            engine.claimed = False
        if engine.state is EngineState.DEAD:
            return False
        engine.state = EngineState.LEASED
        self._keep_spare(engine.spec)
        return True

    async def _begin(self, spec: EngineSpec) -> KeptEngine:
        await self._roused.wait()
        await self._wait_for_dead()
        engine = self._start(spec)
        self._engines.append(engine)
        self._go_on(self._follow(engine))
        return engine

    async def _wait_for_dead(self) -> None:
        """Wait until what has died is gone: before, a GPU's memory is not free."""
        for engine in [one for one in self._engines if one.state is EngineState.DEAD]:
            await engine.wait_until_cleaned_up()

    async def _follow(self, engine: KeptEngine) -> None:
        reason = await engine.wait_until_dead()
        serving = len(self.kept().leased)
        self._tell(EngineDied(reason, engine.was_leased, engine.replica, serving))
        _log.info("engine process %d %s", engine.number, await engine.clean_up())
        self._engines.remove(engine)
        self._logs.append(engine.log)
        while len(self._logs) > _LOGS_KEPT:
            self._logs.popleft().unlink(missing_ok=True)
        if not engine.was_leased and engine.load_s:
            self._keep_spare(engine.spec)

    def _keep_spare(self, spec: EngineSpec) -> None:
        """Begin a spare soon, unless there is one or no engine that it is for."""
        if self._lacks_spare(spec) and spec not in self._planned:
            self._planned.add(spec)
            self._go_on(self._make_spare(spec))

    def _lacks_spare(self, spec: EngineSpec) -> bool:
        states = {one.state for one in self._engines if one.spec == spec}
        return self._spare and states - {EngineState.DEAD} == {EngineState.LEASED}

    async def _make_spare(self, spec: EngineSpec) -> None:
        if any(one.state is EngineState.DEAD for one in self._engines) or self._logs:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _SPARE_DELAY_S)
        self._planned.discard(spec)
        if not self._lacks_spare(spec):
            return
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
            _log.warning("spare engine %d stays on the GPU: %s", engine.number, error.detail)
            return False
        except EngineNotRestored as error:
            self._spare = False  # the next one would fare no better
            engine.kill(error.detail)
            _log.error("no spare engine any more: %s", error.detail)
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
