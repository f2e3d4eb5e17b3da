"""Host of Triton and engines in the parent: runs them for one server after the other."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cog_triton.processes.child import Child, watch
from cog_triton.processes.engine_fleet import EngineFleet
from cog_triton.processes.orders import (
    EndEngine,
    Running,
    StartEngines,
    StartTriton,
    StopEngines,
    StopTriton,
    TritonChanged,
)
from cog_triton.system import log_format, reaper

_TRITON_EXIT_S = 7.0
"""tritonserver's own exit timeout, and two seconds."""
_log = logging.getLogger(__name__)


class Host:
    """Triton and engines. What one server has started stands when the next one begins."""

    def __init__(self, run_dir: Path, report: Callable[[Any], None]) -> None:
        """`report` takes messages for the server of now."""
        self._run_dir = run_dir
        self._report = report
        self._fleet: EngineFleet | None = None
        self._triton: tuple[StartTriton, Child] | None = None
        self._orders: asyncio.Queue[Any] = asyncio.Queue()
        self._obeying = asyncio.ensure_future(self._obey())
        self._watching: asyncio.Future[None]
        # A reaper ends with us, as its end of this closes.
        self._reapers_end, self._our_end = os.pipe()

    async def running(self) -> Running:
        """For a server that begins, once all orders are obeyed."""
        await self._orders.join()
        if self._triton is not None and self._triton[1].ended.done():
            await self._watching
        engines = None if self._fleet is None else self._fleet.order
        order, pid = (self._triton[0], self._triton[1].pid) if self._triton else (None, 0)
        return Running(str(self._run_dir), engines, order, pid)

    def take(self, order: Any) -> None:
        """Take an order of the server; they are obeyed in turn."""
        self._orders.put_nowait(order)

    async def stop(self, *, kills: bool) -> None:
        """End all, in time or killed; no process and no shared memory is left then."""
        self._obeying.cancel()
        await asyncio.gather(self._stop_triton(kills), self._stop_engines(kills))
        os.close(self._our_end)
        os.close(self._reapers_end)

    def hurry(self) -> None:
        """End what `stop` waits for at once."""
        if self._triton is not None:
            self._triton[1].signal(signal.SIGKILL)
        if self._fleet is not None:
            self._fleet.hurry()

    async def _obey(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                await self._do(order)
            except OSError as error:  # no descriptor is left
                _log.error("%s: %s", type(order).__name__, error)
                if isinstance(order, StartTriton):
                    reaper.unlink_shm(order.shm_prefix)
                    self._report(TritonChanged(0, 1, f"Triton did not start: {error}"))
            finally:
                self._orders.task_done()

    async def _do(self, order: Any) -> None:
        if isinstance(order, StartEngines):
            await self._start_engines(order)
        elif isinstance(order, EndEngine):
            if self._fleet is not None:
                self._fleet.end(order.reason, order.replica)
        elif isinstance(order, StopEngines):
            await self._stop_engines(kills=True)
            self._report(order)
        elif isinstance(order, StartTriton):
            self._start_triton(order)
        elif isinstance(order, StopTriton):
            await self._stop_triton(order.kills)

    async def _start_engines(self, order: StartEngines) -> None:
        if (fleet := self._fleet) is not None:
            if not fleet.has_failed:
                order = replace(order, environment=fleet.order.environment)
            if order == fleet.order:
                self._report(fleet.state())
                return
        await self._stop_engines(kills=True)
        self._fleet = EngineFleet(order, self._report)

    async def _stop_engines(self, kills: bool) -> None:
        if self._fleet is not None:
            await self._fleet.stop(kills=kills)
            self._fleet = None

    def _start_triton(self, order: StartTriton) -> None:
        environment: Mapping[str, str] = order.environment
        own, _ = log_format.own()
        with Path(order.log).open("wb") as log, os.fdopen(os.dup(own), "wb") as requests:
            number = requests.fileno()
            if order.request_log != "off":
                name = f"{order.request_log}:{log_format.name(number)}"
                environment = {**environment, log_format.DESCRIPTOR_VARIABLE: name}
            command = reaper.command(
                order.argv,
                parent_fd=self._reapers_end,
                grace=_TRITON_EXIT_S - 1,
                unlink_shm=order.shm_prefix,
                pass_fds=[number],
            )
            descriptors = [self._reapers_end, number]
            child = Child(command, environment, output=log, pass_fds=descriptors, own_end=True)
        self._triton = order, child
        self._report(TritonChanged(child.pid))
        self._watching = asyncio.ensure_future(self._watch_triton(order, child))

    async def _watch_triton(self, order: StartTriton, child: Child) -> None:
        if reason := await watch("Triton", child):
            self._report(TritonChanged(child.pid, 0, reason))
        code = await child.kill()
        reaper.unlink_shm(order.shm_prefix)
        self._triton = None
        self._report(TritonChanged(0, code, reason))

    async def _stop_triton(self, kills: bool) -> None:
        if self._triton is None:
            return
        order, child = self._triton
        if not kills:
            child.signal(order.stop_signal)
            await child.wait(_TRITON_EXIT_S)
        await child.kill()
        await self._watching
