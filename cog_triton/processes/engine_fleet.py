"""Engine fleet: the engine processes of one server, each at a fixed address.

An engine listens once it is loaded. When it dies, another takes its address as soon as its memory
is free: a spare that is asleep, or a new process, with backoff. Clients connect again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cog_triton.engines import engine_spec
from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import EngineNotParked, EngineNotRestored
from cog_triton.processes.engine_child import EngineChild
from cog_triton.processes.engine_replicas import ONE, EngineReplicas
from cog_triton.system.host_memory import resident_bytes

_log = logging.getLogger(__name__)
_LOGS_KEPT = 3
_SPARE_DELAY_S = 5.0  # after a death, whose generations need the CPU for their prompts first
_STABLE_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """The engine `replica` has died; `serving` is the number of engines that still serve.

    It served for `lasted` seconds. If that is None, it did not load, and no other is started.
    """

    reason: str
    replica: int
    serving: int
    lasted: float | None = None


class EngineFleet:
    """Engine processes of `spec`, whose files are in one directory; in one event loop."""

    def __init__(
        self,
        directory: Path,
        spec: EngineSpec,
        replicas: EngineReplicas = ONE,
        *,
        spare: bool = False,
    ) -> None:
        """With a `spare`, of one replica, a second engine waits for the first one's death."""
        self._generations = [0] * replicas.count
        self._directory = directory
        self._spec = spec.parkable() if spare else spec
        self._replicas = replicas
        self._has_spare = spare
        self._environment: Mapping[str, str] = {}
        self._numbers = itertools.count(1)
        self._logs: deque[Path] = deque()
        self._clear()

    def _clear(self) -> None:
        # Another user can see an address, and take it while no engine listens there.
        self._addresses = engine_spec.new_addresses(self._replicas.count)
        self._tasks: list[asyncio.Task[None]] = []
        self._living: set[EngineChild] = set()
        self._serving: dict[int, EngineChild] = {}
        self._spare: asyncio.Task[EngineChild | None] | None = None
        self._spare_taken = asyncio.Event()
        self._serves = asyncio.Event()
        self._deaths: asyncio.Queue[EngineDeath] = asyncio.Queue()
        self._failure: asyncio.Queue[str] = asyncio.Queue()

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables that tritonserver's environment needs."""
        return engine_spec.variables(self._addresses)

    @property
    def serving(self) -> int:
        """Number of engines that serve."""
        return len(self._serving)

    def memory(self) -> Mapping[str, int]:
        """Resident memory in bytes of engine processes, those that serve and others."""
        serving = {engine.root_pid for engine in self._serving.copy().values()}
        others = {engine.root_pid for engine in self._living.copy()} - serving
        return {
            "leased": sum(map(resident_bytes, serving)),
            "spare": sum(map(resident_bytes, others)),
        }

    def start(self, environment: Mapping[str, str]) -> None:
        """Start to load the engines, with this environment, unless they were started.

        If one did not load, all of them begin again.
        """
        if any(task.done() for task in self._tasks):
            self.kill()
        if not self._tasks:
            self._environment = environment
            replicas = range(self._replicas.count)
            self._tasks = [asyncio.ensure_future(self._run(replica)) for replica in replicas]

    async def wait_until_serving(self) -> Mapping[int, int]:
        """Wait until an engine serves; returns the generations of those that do, by replica.

        Forgets the deaths until then.
        """
        await self._serves.wait()
        while not self._deaths.empty():
            self._deaths.get_nowait()
        return {replica: self._generations[replica] for replica in self._serving}

    async def wait_until_failed(self) -> str:
        """Wait until an engine does not load while no other serves, or at the start."""
        return await self._failure.get()

    @property
    def has_died(self) -> bool:
        """Whether `wait_for_death` would return at once."""
        return not self._deaths.empty()

    async def wait_for_death(self) -> EngineDeath:
        """Wait until an engine that served has died, or `wait_until_failed`; one at a time."""
        return await self._deaths.get()

    def end(self, reason: str, replica: int | None = None) -> None:
        """End an engine that serves, or all, for a fault; `wait_for_death` reports it."""
        for number, engine in tuple(self._serving.items()):
            if replica in (None, number):
                engine.end(reason)

    async def stop(self) -> None:
        """End all engines, in time or killed."""
        self._cancel()
        closing = (engine.close() for engine in self._living)
        await asyncio.gather(*closing, return_exceptions=True)
        self._clear()

    def kill(self) -> None:
        """Kill all engines; none is left when this returns, and `start` starts others."""
        self._cancel()
        for engine in self._living:
            engine.kill()
        self._clear()

    def _cancel(self) -> None:
        for task in (*self._tasks, self._spare):
            if task is not None:
                task.cancel()

    async def _run(self, replica: int) -> None:
        """Have one engine after the other serve as `replica`."""
        pause, first = 0.0, True
        while True:
            engine, lasted = await self._load(replica, first=first), 0.0
            if not isinstance(engine, str):
                first = False
                lasted = await self._serve(replica, engine)
            elif first or not self._serving:
                reason = f"the engine did not load: {engine}"
                self._failure.put_nowait(reason)
                self._deaths.put_nowait(EngineDeath(reason, replica, len(self._serving)))
                return
            else:
                _log.error("engine %d is not back, and is tried again: %s", replica, engine)
            pause = 0.0 if lasted >= _STABLE_S else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause or _FIRST_PAUSE_S, _LAST_PAUSE_S)

    async def _serve(self, replica: int, engine: EngineChild) -> float:
        """Have an engine serve, until it has died and its memory is free; returns the seconds."""
        began = time.monotonic()
        self._note(replica, "engine process %d serves", engine.number)
        self._generations[replica] += 1
        engine.serve(self._addresses[replica], self._generations[replica])
        self._serving[replica] = engine
        self._serves.set()
        if self._has_spare and self._spare is None:
            self._begin_spare(delay=_SPARE_DELAY_S if self._logs else 0.0)
        reason = await engine.wait_until_dead()
        del self._serving[replica]
        if not self._serving:
            self._serves.clear()
        lasted = time.monotonic() - began
        self._deaths.put_nowait(EngineDeath(reason, replica, len(self._serving), lasted))
        await self._clean_up(engine)
        return lasted

    async def _load(self, replica: int, *, first: bool) -> EngineChild | str:
        """An engine that can serve; else why there is none."""
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
        """Start an engine and wait until it is loaded; else why it is not."""
        gpus = self._replicas.gpus[replica] if self._replicas.gpus else None
        began, number = time.monotonic(), next(self._numbers)
        on = "" if gpus is None else f" on GPU {gpus}"
        self._note(replica, "engine process %d starts%s: %s", number, on, self._spec.engine)
        try:
            engine = EngineChild(number, self._spec, self._directory, self._environment, gpus)
        except OSError as error:
            return str(error)
        self._living.add(engine)
        if await engine.wait_until_loaded():
            seconds = time.monotonic() - began
            self._note(replica, "engine process %d has loaded in %.2f s", number, seconds)
            return engine
        why = engine.load_error()
        await self._clean_up(engine)
        return why

    def _note(self, replica: int, text: str, *values: object) -> None:
        """Log a stage of a start, below INFO for the first one, which the server reports itself."""
        _log.log(logging.INFO if self._generations[replica] else logging.DEBUG, text, *values)

    async def _clean_up(self, engine: EngineChild) -> None:
        ending = None
        while ending is None:
            try:
                ending = await engine.clean_up()
            except (OSError, subprocess.TimeoutExpired) as error:  # no descriptor left, for example
                _log.error("engine process %d is still there: %s", engine.number, error)
                await asyncio.sleep(_FIRST_PAUSE_S)
        _log.info("engine process %d %s (log: %s)", engine.number, ending, engine.log)
        self._living.discard(engine)
        self._logs.append(engine.log)
        while len(self._logs) > _LOGS_KEPT:
            self._logs.popleft().unlink(missing_ok=True)

    def _begin_spare(self, engine: EngineChild | None = None, delay: float = 0.0) -> None:
        self._spare_taken.clear()
        self._spare = asyncio.ensure_future(self._stand_by(engine, delay))

    async def _stand_by(self, engine: EngineChild | None, delay: float) -> EngineChild | None:
        """Have a spare ready, and another when it dies, until one is taken; returns that."""
        while self._has_spare:
            if engine is None:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._spare_taken.wait(), delay)
                loaded = await self._begin(0)
                if isinstance(loaded, str):
                    _log.warning("no spare engine: %s", loaded)
                    return None
                engine = loaded
                if not self._spare_taken.is_set():
                    await self._park(engine)
            waits = [
                asyncio.ensure_future(wait)
                for wait in (self._spare_taken.wait(), engine.wait_until_dead())
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._spare_taken.is_set():
                return engine
            await self._clean_up(engine)
            engine, delay = None, _SPARE_DELAY_S
        return None

    async def _take_spare(self) -> EngineChild | None:
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        self._spare_taken.set()
        engine = await spare
        return engine if engine is not None and await self._wake(engine) else None

    async def _park(self, engine: EngineChild) -> bool:
        """Park a spare, if its family can be; returns whether it sleeps."""
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
            seconds, size = time.monotonic() - began, resident_bytes(engine.root_pid) / 1e9
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
