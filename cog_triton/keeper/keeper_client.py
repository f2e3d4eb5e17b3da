"""Engine keeper as a child process, and what it tells its supervisor."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from cog_triton.errors import EngineIncompatible, TritonStartFailed, TritonUnavailable
from cog_triton.ipc.streams import Stream
from cog_triton.keeper import watchdog
from cog_triton.keeper.keeper_messages import (
    GPUS,
    HEARTBEAT_S,
    KEEPER_VARIABLE,
    REPLICAS_VARIABLE,
    EngineDied,
    EngineLeased,
    EnginesKept,
    EngineSpec,
    KillLeased,
    Watch,
)
from cog_triton.system import reaper
from cog_triton.system.gpus import VISIBLE_GPUS, visible_gpus
from cog_triton.system.host_memory import resident_bytes


@dataclass(frozen=True, slots=True)
class EngineReplicas:
    """Number of engines, and the CUDA_VISIBLE_DEVICES of each.

    Without `gpus` all see the same ones, or there are none.
    """

    count: int = 1
    gpus: Sequence[str] = ()


ONE = EngineReplicas()


def share_gpus(
    count: int,
    needed: int,
    environment: Mapping[str, str] = os.environ,
    count_gpus: Callable[[], int] = lambda: len(visible_gpus()),
) -> EngineReplicas:
    """Replicas of `needed` GPUs each, in the order of CUDA_VISIBLE_DEVICES where that is set.

    Engines that need no GPU share none; nor do any where the driver knows of no GPU, as the engine
    itself says best what it lacks. Raises E1305 where there are GPUs, and too few.
    """
    if count == 1 or not needed:
        return EngineReplicas(count)
    given = environment.get(VISIBLE_GPUS)
    if given is None:
        names = [str(number) for number in range(count_gpus())]
        if not names:
            return EngineReplicas(count)
    else:
        listed = (name.strip() for name in given.split(",") if name.strip())
        # CUDA sees none from a negative number on; of a GPU that is named twice there is but one.
        names = list(dict.fromkeys(takewhile(lambda name: not name.startswith("-"), listed)))
    if len(names) < count * needed:
        here = f"{VISIBLE_GPUS}={given}" if given is not None else "this machine"
        raise EngineIncompatible(
            f"ENGINE_REPLICAS={count}: needs {count * needed} GPUs, {needed} for each engine;"
            f" {here} has {len(names)}"
        )
    shares = (names[start : start + needed] for start in range(0, count * needed, needed))
    return EngineReplicas(count, tuple(",".join(share) for share in shares))


_PROGRAM = "cog_triton.keeper.keeper_process"
_START_TIMEOUT_S = 30.0
_GRACE_S = 12.0
_POLL_S = 0.01
_SILENCE_S = 2 * HEARTBEAT_S
_KEEPER = "the engine keeper"


class KeeperClient:
    """An engine keeper under a reaper; its log and those of its engines are in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        spare: bool = False,
        replicas: EngineReplicas = ONE,
    ) -> None:
        """With a `spare` it has another engine ready beside those at work.

        Of several `replicas`, each is on GPUs of its own.
        """
        self.name = f"cog-triton-keeper-{secrets.token_hex(8)}"
        """Its socket, in Linux's abstract namespace."""
        self._directory = directory
        self._replicas = replicas
        self._options = [
            *(["spare"] if spare else []),
            *(f"{GPUS}{share}" for share in replicas.gpus),
        ]
        self._process: reaper.Reaped | None = None
        self._following: asyncio.Task[None] | None = None
        self._stream: Stream | None = None
        self._deaths: asyncio.Queue[EngineDied] = asyncio.Queue()
        self._leased = asyncio.Event()
        self._kept = EnginesKept()
        self._due = math.inf
        self._loss = ""
        self.lost = False
        """Whether the keeper has died since its last start."""

    @property
    def alive(self) -> bool:
        """Whether it runs; its reaper does for longer, to end the engines of a dead one."""
        return not self.lost and self._process is not None and self._process.poll() is None

    @property
    def variables(self) -> Mapping[str, str]:
        """What tritonserver's environment needs."""
        return {KEEPER_VARIABLE: self.name, REPLICAS_VARIABLE: str(self._replicas.count)}

    @property
    def serving(self) -> int:
        """Number of engines that are leased."""
        return len(self._kept.leased)

    async def start(self, environment: Mapping[str, str], ahead: EngineSpec | None = None) -> None:
        """Start it, with the environment for engines, and have `ahead` load; E2106 without one.

        What a dead one has left is killed before.
        """
        self.kill()
        self.lost, self._loss = False, ""
        log_path = self._directory / "keeper.log"
        with log_path.open("ab") as log:
            self._process = reaper.spawn(
                [sys.executable, "-m", _PROGRAM, self.name, str(self._directory), *self._options],
                grace=_GRACE_S,
                env=environment,
                stdout=log,
                stderr=log,
            )
        for _ in range(round(_START_TIMEOUT_S / _POLL_S)):
            with suppress(OSError):
                self._stream = await Stream.to(self.name)
                break
            if not self.alive:
                break
            await asyncio.sleep(_POLL_S)
        else:
            self.kill()
        if self._stream is None:
            said = log_path.read_text("utf-8", "replace")
            raise TritonStartFailed(f"the engine keeper does not start (log: {log_path}):\n{said}")
        self._stream.send(Watch(ahead))
        self._deaths, self._leased = asyncio.Queue(), asyncio.Event()
        self._following = asyncio.ensure_future(self._until_lost(self._stream))

    def engine_memory(self) -> Mapping[str, int]:
        """Resident memory in bytes of engine processes, those at work and spares."""
        kept = self._kept
        return {
            "leased": sum(map(resident_bytes, kept.leased)),
            "spare": sum(map(resident_bytes, kept.spare)),
        }

    async def wait_until_leased(self) -> None:
        """Wait until a stub has an engine; raises E2105 once the keeper is lost."""
        await self._leased.wait()
        if self.lost:
            raise TritonUnavailable(self._loss)

    async def wait_until_lost(self) -> str:
        """Wait until the keeper itself has died, was stopped or hangs; returns what happened."""
        if self._following is not None:
            await asyncio.wait({self._following})
        return self._loss or f"{_KEEPER} was killed"

    def forget_deaths(self) -> None:
        """Forget the deaths of engines until now, but not the loss of the keeper."""
        while not (self.lost or self._deaths.empty()):
            self._deaths.get_nowait()

    async def wait_for_death(self) -> EngineDied:
        """Wait until a leased engine, or the keeper itself, has died; returns what happened."""
        return await self._deaths.get()

    def kill_engine(self, reason: str, replica: int | None = None) -> None:
        """Kill the engine leased as `replica`, or all, for a fault; `wait_for_death` tells it."""
        if self._stream is not None:
            self._stream.send(KillLeased(reason, replica))

    async def stop(self) -> None:
        """End its engines and the keeper, in time or killed."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the keeper and its engines; none is left when this returns."""
        if self._following is not None:
            self._following.cancel()
        if self._stream is not None:
            self._stream.close()
        if self._process is not None:
            self._process.kill()
        self._following = self._stream = self._process = None

    async def _until_lost(self, stream: Stream) -> None:
        """Take messages until the keeper has died, was stopped, or hangs; the next start kills it.

        The same goes for its reaper, and for a keeper that cannot be watched.
        """
        ends = [asyncio.ensure_future(end) for end in (self._read(stream), self._watch(stream))]
        try:
            (first, *_), _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            error = first.exception()
            loss = f"{_KEEPER} cannot be watched: {error!r}" if error else first.result()
            self._kept, self.lost, self._loss = EnginesKept(), True, loss
            self._deaths.put_nowait(EngineDied(self._loss))
            self._leased.set()  # for those that wait in vain
        finally:
            for end in ends:
                end.cancel()

    async def _watch(self, stream: Stream) -> str:
        assert self._process is not None
        root = self._process.process.pid
        pid = stream.peer_pid
        self._due = time.monotonic() + _SILENCE_S
        return await watchdog.watch(_KEEPER, pid, lambda: {root, pid}, lambda: self._due)

    async def _read(self, stream: Stream) -> str:
        try:
            while True:
                event = await stream.receive()
                self._due = time.monotonic() + _SILENCE_S
                if isinstance(event, EngineLeased):
                    self._leased.set()
                elif isinstance(event, EnginesKept):
                    self._kept = event
                elif isinstance(event, EngineDied) and event.leased:
                    if not event.serving:
                        self._leased.clear()
                    self._deaths.put_nowait(event)
        except EOFError:
            return f"{_KEEPER} has died"
