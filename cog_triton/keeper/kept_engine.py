"""Kept engine: one engine process under a reaper of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cog_triton.errors import CogTritonError, EngineNotRestored
from cog_triton.ipc.streams import Stream
from cog_triton.keeper import watchdog
from cog_triton.keeper.keeper_messages import (
    EngineSpec,
    FallAsleep,
    NotOpened,
    Opened,
    SleepChanged,
    Stop,
    WakeUp,
)
from cog_triton.system import isolated_python, reaper
from cog_triton.system.gpus import VISIBLE_GPUS
from cog_triton.system.process_state import with_descendants
from cog_triton.system.shared_time import SharedTimeReader, file_of

_log = logging.getLogger(__name__)
_PROGRAM = "cog_triton.backend.engine_process"
_EXIT_GRACE_S = 5.0
_REAP_S = 0.2
_CLOSE_TIMEOUT_S = 10.0
_TAIL_LINES = 25


class EngineState(enum.StrEnum):
    """Lifecycle of an engine process."""

    LOADING = "loading"
    READY = "ready"
    LEASED = "leased"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ParkedEngine:
    """How an engine is parked: its host memory in bytes, and in how many seconds that was done."""

    host_bytes: int
    seconds: float

    def __str__(self) -> str:
        held = f"it has {self.host_bytes / 1e9:.1f} GB of host memory"
        return f"asleep in {self.seconds:.1f} s, {held}"


class KeptEngine:
    """One engine process; it connects to the keeper, and its death is seen in milliseconds.

    `address` is the socket where it takes peers, `pid` its process id once it has started. Its
    output goes to `log`.
    """

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        keeper: str,
        directory: Path,
        gpus: str | None = None,
    ) -> None:
        """Start it; `keeper` is the socket of the keeper, `directory` is for its files.

        `gpus` is its CUDA_VISIBLE_DEVICES, by default that of the keeper.
        """
        self.number = number
        self.spec = spec
        self.gpus = gpus
        self.replica = 0
        """What it is leased as, or was."""
        self.state = EngineState.LOADING
        self.address = f"{keeper}-{number}"
        self.log = directory / f"engine-{number}.log"
        self.pid: int | None = None
        self.parked: ParkedEngine | None = None
        """How it sleeps, while it does: a spare that is ready."""
        self.claimed = False
        """Whether somebody waits for it to load."""
        self.was_leased = False
        """Whether it was leased when it ended."""
        self.load_s = 0.0
        self._began = time.monotonic()
        self._loaded = asyncio.Event()
        self._ended = asyncio.Event()
        self._cleaned = asyncio.Event()
        self._error: CogTritonError | None = None
        self._reason: str | None = None
        self._control: Stream | None = None
        self._answers: asyncio.Queue[SleepChanged] = asyncio.Queue()
        self._descriptors: list[int] = []
        command = [spec.python, "-m", _PROGRAM, spec.engine, json.dumps(dict(spec.parameters))]
        with self.log.open("wb") as log:
            self._process = reaper.spawn(
                [*command, keeper, str(number), self.address],
                grace=_EXIT_GRACE_S,
                env=_environment(spec, directory, gpus),
                stdout=log,
                stderr=log,
            )
        self._watch_exit(self._process.process.pid)
        self._watching = asyncio.ensure_future(self._watch(self.root_pid, None))

    @property
    def root_pid(self) -> int:
        """Process id of the reaper, above all of the engine's processes."""
        return self._process.process.pid

    async def attached(self, pid: int, stream: Stream) -> None:
        """Follow the connection that its process `pid` has made, until that ends."""
        self.pid, self._control = pid, stream
        try:
            self._watch_exit(pid)
            message = await stream.receive()
            if isinstance(message, Opened):
                self.load_s = time.monotonic() - self._began
                self.state = EngineState.READY
                self._loaded.set()
                _log.info("engine process %d has loaded in %.2f s", self.number, self.load_s)
                self._watching.cancel()
                self._watching = asyncio.ensure_future(self._watch(pid, message.progress))
            elif isinstance(message, NotOpened):
                self._error = message.error
            while True:
                self._answers.put_nowait(await stream.receive())
        except (EOFError, ProcessLookupError):
            pass
        self._end()

    async def ask(self, order: FallAsleep | WakeUp, timeout_s: float) -> SleepChanged:
        """Send an order and wait until the engine has done it, one at a time.

        Raises the coded error that it answers with, or E2111 when it ends or does not answer.
        """
        assert self._control is not None
        self._control.send(order)
        answered = asyncio.ensure_future(self._answers.get())
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait(
            {answered, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in (answered, ended):
            wait.cancel()
        if not answered.done():
            how = "has ended" if ended.done() else f"does not answer within {timeout_s:g} s"
            raise EngineNotRestored(f"the engine's process {how}: {type(order).__name__}")
        answer: SleepChanged = answered.result()
        if answer.error is not None:
            raise answer.error
        return answer

    async def wait_until_loaded(self) -> None:
        """Wait until it can be leased, or has ended."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._loaded, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def wait_until_dead(self) -> str:
        """Wait for its end, however it comes; returns what happened."""
        await self._ended.wait()
        return self._reason or f"the engine's process ({self.pid or 'loading'}) has died"

    async def clean_up(self) -> str:
        """After its end, kill all that it left, which frees its memory; returns how it ended."""
        try:
            return _ending(await asyncio.to_thread(self._kill_rest))
        finally:
            self._cleaned.set()

    async def wait_until_cleaned_up(self) -> None:
        """Wait until none of its processes is left."""
        await self._cleaned.wait()

    def kill(self, reason: str) -> None:
        """Count it as dead, for `reason`, unless it is; `clean_up` kills it."""
        if self.state is not EngineState.DEAD:
            self._reason = reason
            self._end()

    async def end(self, seconds: float, reason: str) -> None:
        """Wait for so long until it has ended by itself; then have it killed for `reason`."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        self.kill(reason)

    async def close(self) -> None:
        """Ask it to end; one that does not in time, or loads or is parked and cannot, is killed."""
        serves = self.state in (EngineState.READY, EngineState.LEASED)
        if self._control is not None and not self.parked and serves:
            self._control.send(Stop())
            await self.end(_CLOSE_TIMEOUT_S, "the engine's process did not end in time")
        self.kill("the engine was closed")

    def load_error(self) -> CogTritonError | str:
        """Why it ended before it was loaded."""
        if self._error is not None:
            return self._error
        lines = self.log.read_text("utf-8", "replace").splitlines()[-_TAIL_LINES:]
        reason = self._reason or "its process has ended"
        return f"the engine did not load: {reason}; its last lines (of {self.log}):\n" + "\n".join(
            lines
        )

    def _watch_exit(self, pid: int) -> None:
        """Notice the end of a process at once, whoever holds its connections."""
        descriptor = os.pidfd_open(pid)
        self._descriptors.append(descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._end)

    async def _watch(self, pid: int, progress: int | None) -> None:
        pids = partial(with_descendants, self.root_pid)
        try:
            due = None if progress is None else SharedTimeReader(file_of(pid, progress)).read
            self.kill(await watchdog.watch("the engine", pid, pids, due))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended meanwhile, which `_watch_exit` tells
        except OSError as error:
            self.kill(f"the engine's process ({pid}) cannot be watched: {error}")

    def _end(self) -> None:
        self._watching.cancel()
        if self.state is not EngineState.DEAD:
            self.was_leased = self.state is EngineState.LEASED
            self.state = EngineState.DEAD
            _log.info("engine process %d has ended", self.number)
        for descriptor in self._descriptors:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()
        if self._control is not None:
            self._control.close()
        self._ended.set()

    def _kill_rest(self) -> int | None:
        """Kill what is left; the exit code, None where the reaper was killed before it told."""
        code = None
        if self._reason is None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_REAP_S)
        self._process.kill()
        return code


def _environment(spec: EngineSpec, directory: Path, gpus: str | None) -> Mapping[str, str] | None:
    if not (spec.isolated or gpus):
        return None
    ours = dict(os.environ)
    kept = isolated_python.environment(directory / "engine-python") if spec.isolated else ours
    return {**kept, VISIBLE_GPUS: gpus} if gpus else kept


def _ending(code: int | None) -> str:
    if code is None:
        return "has died"
    if code > 128 and code - 128 in {number.value for number in signal.Signals}:
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with {code}"
