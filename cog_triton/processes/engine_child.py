"""Engine child: one engine process under a reaper of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from cog_triton.engines.engine_orders import (
    FallAsleep,
    NotOpened,
    Opened,
    Serve,
    Stop,
    WakeUp,
)
from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import CogTritonError, EngineNotRestored
from cog_triton.ipc.streams import Stream
from cog_triton.processes import watchdog
from cog_triton.system import isolated_python, reaper
from cog_triton.system.gpus import VISIBLE_GPUS
from cog_triton.system.process_state import with_descendants
from cog_triton.system.shared_time import SharedTime

_PROGRAM = "cog_triton.backend.engine_process"
_EXIT_GRACE_S = 5.0
_REAP_S = 0.2
_CLOSE_TIMEOUT_S = 10.0
_SLEEP_S = 120.0  # the first time host memory is pinned: 9 s for 16 GB
_WAKE_S = 60.0
_TAIL_LINES = 25


class EngineChild:
    """One engine process, whose death is seen in milliseconds; its output goes to `log`."""

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        directory: Path,
        environment: Mapping[str, str],
        gpus: str | None = None,
    ) -> None:
        """Start it; its files go to `directory`. `gpus` is its CUDA_VISIBLE_DEVICES.

        Raises OSError if something is lacking.
        """
        self.number = number
        self.log = directory / f"engine-{number}.log"
        self.asleep = False
        self._pid: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._error: CogTritonError | None = None
        self._reason: str | None = None
        self._control: Stream | None = None
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._descriptors: list[int] = []
        self._killing = threading.Lock()
        with ExitStack() as undo:
            self._progress = undo.enter_context(closing(SharedTime()))
            self._socket, its = socket.socketpair()
            undo.enter_context(self._socket)
            with its, self.log.open("wb") as log:
                descriptors = [its.fileno(), self._progress.descriptor]
                parameters = json.dumps(dict(spec.parameters))
                self._process = reaper.spawn(
                    [spec.python, "-m", _PROGRAM, spec.engine, parameters, *map(str, descriptors)],
                    grace=_EXIT_GRACE_S,
                    env=_environment(spec, directory, environment, gpus),
                    stdout=log,
                    stderr=log,
                    pass_fds=descriptors,
                )
            undo.pop_all()
        self._watching = asyncio.ensure_future(self._watch(self.root_pid))
        self._following = asyncio.ensure_future(self._follow())

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    @property
    def root_pid(self) -> int:
        """Process id of the reaper, above all of the engine's processes."""
        return self._process.process.pid

    def serve(self, address: str, generation: int) -> None:
        """Have it listen at an address, which it does within milliseconds."""
        self._send(Serve(address, generation))

    async def fall_asleep(self) -> None:
        """Park it, unless it has served.

        Raises E2110 if it stays as it was, and E2111 if it must be ended.
        """
        await self._ask(FallAsleep(), _SLEEP_S)
        self.asleep = True

    async def wake_up(self) -> None:
        """Take it back to the GPU; it must be ended after an error, E2110 or E2111."""
        await self._ask(WakeUp(), _WAKE_S)
        self.asleep = False

    async def wait_until_loaded(self) -> bool:
        """Wait until it is loaded, or has ended; returns whether it lives."""
        message = await self._next()
        if isinstance(message, Opened) and self.alive:
            self._pid = message.pid
            with suppress(OSError):  # its reaper and its connection end, too
                self._watch_exit(message.pid)
            self._watching.cancel()
            self._watching = asyncio.ensure_future(self._watch(message.pid))
            return True
        if isinstance(message, NotOpened):
            self._error = message.error
        await self._ended.wait()
        return False

    async def wait_until_dead(self) -> str:
        """Wait for its end, however it comes; returns the reason."""
        await self._ended.wait()
        return self._reason or f"the engine's process ({self._pid or 'loading'}) has died"

    async def clean_up(self) -> str:
        """After its end, kill all that it left, which frees its memory; returns how it ended.

        Raises OSError or TimeoutExpired if something is left, or cannot be looked for.
        """
        return _ending(await asyncio.to_thread(self._kill_rest))

    def end(self, reason: str) -> None:
        """Count it as dead, for `reason`, unless it is; `clean_up` kills it."""
        if self.alive:
            self._reason = reason
            self._end()

    def kill(self) -> None:
        """Kill it at once; none of its processes is left when this returns."""
        self.end("the engine was closed")
        self._kill_rest()

    async def close(self) -> None:
        """Ask it to end; one that does not in time, or loads or sleeps and cannot, is killed."""
        if self.alive and self._pid is not None and not self.asleep:
            self._send(Stop())
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _CLOSE_TIMEOUT_S)
        self.end("the engine was closed")
        await self.clean_up()

    def load_error(self) -> str:
        """Why it ended before it was loaded: its coded error, or its last lines."""
        if self._error is not None:
            return str(self._error)
        reason, text = self._reason or "its process has ended", ""
        with suppress(OSError):  # no descriptor is left
            text = self.log.read_text("utf-8", "replace")
        tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
        return f"{reason}; its last lines (of {self.log}):\n{tail}"

    def _send(self, order: Serve | FallAsleep | WakeUp | Stop) -> None:
        assert self._control is not None
        self._control.send(order)

    async def _ask(self, order: FallAsleep | WakeUp, timeout_s: float) -> None:
        """Send an order and wait until the engine has done it."""
        self._send(order)
        answer = await self._next(timeout_s)
        if answer is None:
            how = f"does not answer within {timeout_s:g} s" if self.alive else "has ended"
            raise EngineNotRestored(f"the engine's process {how}: {type(order).__name__}")
        if answer.error is not None:
            raise answer.error

    async def _next(self, timeout_s: float | None = None) -> Any:
        """Its next message; None if it has ended, or says nothing in time."""
        waits = [asyncio.ensure_future(wait) for wait in (self._messages.get(), self._ended.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        message, _ = waits
        return message.result() if message.done() else None

    async def _follow(self) -> None:
        """Take its messages until its end."""
        try:
            self._watch_exit(self.root_pid)
            self._control = await Stream.of(self._socket)
            while True:
                self._messages.put_nowait(await self._control.receive())
        except (EOFError, OSError):
            self._end()

    def _watch_exit(self, pid: int) -> None:
        """Notice the end of a process at once, whoever has its connections."""
        descriptor = os.pidfd_open(pid)
        self._descriptors.append(descriptor)
        self._loop.add_reader(descriptor, self._end)

    async def _watch(self, pid: int) -> None:
        pids = partial(with_descendants, self.root_pid)
        self.end(await watchdog.watch("the engine", pid, pids, self._progress.read))

    def _end(self) -> None:
        if not self.alive:
            return
        self._ended.set()
        for task in (self._watching, self._following):
            task.cancel()
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        if self._control is not None:
            self._control.close()
        self._socket.close()
        self._progress.close()

    def _kill_rest(self) -> int | None:
        """Kill what is left; the exit code, None if the reaper was killed before it knew."""
        code = None
        with self._killing:
            if self._reason is None:
                with suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(_REAP_S)
            self._process.kill()
        return code


def _environment(
    spec: EngineSpec, directory: Path, environment: Mapping[str, str], gpus: str | None
) -> Mapping[str, str]:
    if spec.isolated:
        environment = isolated_python.environment(directory / "engine-python", environment)
    return {**environment, VISIBLE_GPUS: gpus} if gpus else environment


def _ending(code: int | None) -> str:
    if code is None:
        return "has died"
    if code > 128 and code - 128 in {number.value for number in signal.Signals}:
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with {code}"
