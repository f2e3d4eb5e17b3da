"""Engine child: one engine process, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from cog_triton.engines.engine_orders import FallAsleep, NotOpened, Opened, Serve, Stop, WakeUp
from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import EngineNotRestored
from cog_triton.ipc.messages import Stream
from cog_triton.processes.child import Child, described, watch
from cog_triton.system import isolated_python
from cog_triton.system.gpus import VISIBLE_GPUS
from cog_triton.system.shared_time import SharedTime

_PROGRAM = "cog_triton.backend.engine_process"
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
        self.loaded = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reason = ""
        self._control: Stream | None = None
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        if spec.isolated:
            environment = isolated_python.environment(directory / "engine-python", environment)
        if gpus:
            environment = {**environment, VISIBLE_GPUS: gpus}
        with ExitStack() as undo:
            self._progress = undo.enter_context(closing(SharedTime()))
            self._socket, its = socket.socketpair()
            undo.enter_context(self._socket)
            with its, self.log.open("wb") as log:
                descriptors = [its.fileno(), self._progress.descriptor]
                parameters = json.dumps(dict(spec.parameters))
                self.process = Child(
                    [spec.python, "-m", _PROGRAM, spec.engine, parameters, *map(str, descriptors)],
                    environment,
                    output=log,
                    pass_fds=descriptors,
                )
            undo.pop_all()
        self._watching = asyncio.ensure_future(self._watch())
        self._following = asyncio.ensure_future(self._follow())

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self.ended.done()

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

    async def load(self) -> str:
        """Wait until it is loaded, or has ended; why it is not, its error or last lines."""
        message = await self._next()
        if isinstance(message, Opened) and self.alive:
            self.loaded = True
            return ""
        await asyncio.wait({self.ended})
        if isinstance(message, NotOpened):
            return str(message.error)
        reason, text = self._reason or "its process has ended", ""
        with suppress(OSError):  # no descriptor is left
            text = self.log.read_text("utf-8", "replace")
        tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
        return f"{reason}; its last lines (of {self.log}):\n{tail}"

    async def wait_until_dead(self) -> str:
        """Wait for its end; returns the reason."""
        await asyncio.wait({self.ended})
        return self._reason or f"the engine's process ({self.process.pid}) has died"

    async def clean_up(self) -> str:
        """After its end, kill all that it left, which frees its memory; returns how it ended.

        Raises OSError or TimeoutError if something is left, or cannot be looked for.
        """
        known = not self._reason and await self.process.wait(_REAP_S)
        code = await self.process.kill()
        return described(code) if known else "has died"

    def end(self, reason: str) -> None:
        """Count it as dead, for `reason`, unless it is; `clean_up` kills it."""
        if self.alive:
            self._reason = reason
            self._end()

    async def close(self, *, kills: bool = False) -> None:
        """Ask it to end, or kill it; none of its processes is left when this returns.

        One that does not end in time, or loads or sleeps and cannot, is killed.
        """
        if not kills and self.alive and self.loaded and not self.asleep:
            self._send(Stop())
            await asyncio.wait({self.ended}, timeout=_CLOSE_TIMEOUT_S)
        self.end("the engine was closed")
        await self.clean_up()

    def _send(self, order: Serve | FallAsleep | WakeUp | Stop) -> None:
        assert self._control is not None
        self._control.send(order)

    async def _ask(self, order: FallAsleep | WakeUp, timeout_s: float) -> None:
        self._send(order)
        answer = await self._next(timeout_s)
        if answer is None:
            how = f"does not answer within {timeout_s:g} s" if self.alive else "has ended"
            raise EngineNotRestored(f"the engine's process {how}: {type(order).__name__}")
        if answer.error is not None:
            raise answer.error

    async def _next(self, timeout_s: float | None = None) -> Any:
        """Its next message; None if it has ended, or says nothing in time."""
        if not self.alive and self._messages.empty():
            return None
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._messages.get(), timeout_s)

    async def _follow(self) -> None:
        try:
            self._control = await Stream.of(self._socket)
            while True:
                self._messages.put_nowait(await self._control.receive())
        except (EOFError, OSError):
            self._end()

    async def _watch(self) -> None:
        self.end(await watch("the engine", self.process, self._progress.read))

    def _end(self) -> None:
        if not self.alive:
            return
        self.ended.set_result(None)
        self._messages.put_nowait(None)
        for task in (self._watching, self._following):
            task.cancel()
        if self._control is not None:
            self._control.close()
        self._socket.close()
        self._progress.close()
