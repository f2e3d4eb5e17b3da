"""The parent: starts the server, Cog, Triton and engines, restarts what dies, and ends with all.

| process | when it dies, is stopped or hangs | after TRITON_MAX_RESTARTS failures in a row |
|---|---|---|
| engine | this starts another, or wakes the spare; Triton and streams stay | the server gives up |
| tritonserver | the server has it started again; engines stay | the server gives up |
| server | this starts it again; all else and the public sockets stay | this exits with 1 |
| Cog | this starts it again; the rest stays | this exits with 1 |
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cog_triton.errors import CogTritonError, TritonStartFailed, TritonUnavailable
from cog_triton.ipc.messages import Stream
from cog_triton.processes import child as processes
from cog_triton.processes.child import Child, cpu_time, described, watch
from cog_triton.processes.host import Host
from cog_triton.processes.orders import NotReady, Ready, RestartCog, Running, StopCog
from cog_triton.processes.restarts import STABLE_S, Restarts
from cog_triton.settings import Settings
from cog_triton.system.host_memory import OomKills
from cog_triton.system.ports import private_ports
from cog_triton.system.process_tuning import raise_open_files
from cog_triton.system.shared_time import SharedTime
from cog_triton.system.work_dir import fresh_run_dir, require_usable

_SERVER = "cog_triton.front.server"
_SERVED, _COG = "the server", "Cog"
# Platforms have to wait 15 s longer than DRAIN_TIMEOUT.
_EXIT_S = 14.0
_HURRY_S = 3.0
_LOSS_S = 2.0
_COG_EXIT_S = 5.0
_TIDY_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Programs:
    """What the parent starts: the server's own arguments, and Cog's command; one environment each.

    Without `cog_command` no Cog is started. Both run in `cwd`, this process's directory if None.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    cog_command: Sequence[str] = ()
    cog_environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None


class Parent:
    """Serves on public sockets until SIGTERM, SIGINT or POST /shutdown; the second one hurries.

    SIGUSR1 reports that a rank which another launcher started has died: all requests fail.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: Mapping[str, socket.socket],
        programs: Programs,
        *,
        stays: bool = False,
        on_ready: Callable[[float, str], None] = lambda seconds, message: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """With `stays`, a server whose start has failed runs on: /health-check says SETUP_FAILED.

        `on_ready` is called once, with the seconds that the start has taken and the server's own
        message; `on_stop` at the first signal after that.
        """
        self._settings = settings
        self._sockets = sockets
        self._programs = programs
        self._stays = stays
        self._on_ready, self._on_stop = on_ready, on_stop
        self._began = time.monotonic()
        self._oom_kills = OomKills()
        self._stop, self._cog_stop = asyncio.Event(), asyncio.Event()
        self._hurries = self._was_ready = False
        self._serves_since = {_SERVED: 0.0}
        self._failure: CogTritonError | None = None
        self._server: Child | None = None
        self._stream: Stream | None = None
        self._cog: Child | None = None
        self._faults: dict[str, asyncio.Future[Any]] = {}
        self._cog_cpu = -1
        self._host: Host | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    async def run(self, *, builds: bool = False) -> None:
        """Serve; raises the coded error that it ends with. A server that `builds` has no Triton."""
        loop = asyncio.get_running_loop()
        processes.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        lost = TritonUnavailable("another rank has died (SIGUSR1); stopping")
        loop.add_signal_handler(signal.SIGUSR1, self._fail, lost)
        raise_open_files()
        if not builds:
            require_usable(self._settings.work_dir)
            self._host = Host(fresh_run_dir(self._settings.work_dir), self._report)
        self._do(self._tidy())
        with private_ports(self._sockets) as private:
            if self._programs.cog_command:
                self._do(self._serve_cog(private["PORT"]))
            try:
                await self._repeat(_SERVED, lambda: self._run_server(private), self._stop)
                if self._failure is not None:
                    raise self._failure
            finally:
                for public in self._sockets.values():
                    public.close()  # nobody answers who connects while Triton exits
                self._cog_stop.set()
                for task in self._tasks:
                    task.cancel()
                for one in (self._server, self._cog):
                    if one is not None:
                        await one.kill()
                if self._host is not None:
                    await self._host.stop(kills=self._hurries or self._failure is not None)

    async def _repeat(
        self, what: str, run: Callable[[], Awaitable[str]], stop: asyncio.Event
    ) -> None:
        """Have one after the other, until one ends that was asked to; raises E2106 if it gives up.

        `run` returns why one has ended, blank if it was asked to.
        """
        restarts = Restarts(self._settings.triton_max_restarts)
        while not stop.is_set():
            try:
                reason = await run()
            except OSError as error:  # no process, memory or descriptor is left
                reason = f"{what} did not start: {error}"
            if not reason or stop.is_set():
                return
            if what == _SERVED and not self._was_ready:
                raise TritonStartFailed(f"{reason} during start-up")
            restarts.failed(stable=time.monotonic() - self._serves_since[what] >= STABLE_S)
            if restarts.given_up:
                raise TritonStartFailed(restarts.sentence(reason))
            _log.error("%s; it is started again", reason)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), restarts.pause)

    async def _run_server(self, private: Mapping[str, int]) -> str:
        own, its = socket.socketpair()
        with its, closing(SharedTime()) as due:
            sockets = {**self._sockets, "parent": its}
            descriptors = [*(one.fileno() for one in sockets.values()), due.descriptor]
            words = [f"--listen={name}={one.fileno()}" for name, one in sockets.items()]
            words += [f"--private={name}={port}" for name, port in private.items()]
            words.append(f"--due={due.descriptor}")
            command = [sys.executable, "-m", _SERVER, *words, *self._programs.arguments]
            environment, cwd = self._programs.environment, self._programs.cwd
            self._server = Child(command, environment, cwd=cwd, pass_fds=descriptors)
            its.close()
            running = Running("") if self._host is None else await self._host.running()
            self._stream = await Stream.of(own)
            self._serves_since[_SERVED] = math.inf
            self._report(running)
            following = self._do(self._follow(self._stream))
            reason = await self._watch(_SERVED, self._server, due.read, mends=True)
            following.cancel()
            self._stream.close()
            self._server = self._stream = None
        return "" if reason.startswith(f"{_SERVED} {described(0)}") else reason

    async def _watch(
        self, what: str, child: Child, *due: Callable[[], float], mends: bool = False
    ) -> str:
        """Wait until it has ended, or is at fault and was killed; why."""
        self._faults[what] = fault = asyncio.get_running_loop().create_future()
        watching = self._do(watch(what, child, *due, mends=mends))
        await asyncio.wait({watching, fault}, return_when=asyncio.FIRST_COMPLETED)
        wrong = str(fault.result()) if fault.done() else watching.result()
        code = await child.kill()
        return wrong or f"{what} {described(code)}{self._oom_kills.hint()}"

    async def _follow(self, stream: Stream) -> None:
        with suppress(EOFError, OSError):
            while True:
                order = await stream.receive()
                if isinstance(order, Ready):
                    self._on_server_ready(order.message)
                elif isinstance(order, NotReady):
                    self._on_failure(order)
                elif isinstance(order, StopCog):
                    self._do(self._stop_cog())
                elif isinstance(order, RestartCog):
                    self._restart_cog(order)
                elif self._host is not None:
                    self._host.take(order)

    def _on_server_ready(self, message: str) -> None:
        self._serves_since[_SERVED] = now = time.monotonic()
        if not self._was_ready:
            self._was_ready = True
            self._on_ready(now - self._began, message)

    def _on_failure(self, found: NotReady) -> None:
        if found.ends or not (self._was_ready or self._stays):
            self._failure = found.error
            self._stop.set()
        if not found.ends and (self._was_ready or not self._stays):
            self._faults[_SERVED].set_result(found.error)

    def _report(self, message: Any) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _do(self, work: Any) -> asyncio.Future[Any]:
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_signal(self) -> None:
        self._hurries = self._stop.is_set()
        if self._hurries and self._server is None and self._host is not None:
            self._host.hurry()
        if not self._hurries and self._was_ready:
            self._on_stop()
        self._stop.set()
        patience = _HURRY_S if self._hurries else self._settings.drain_timeout + _EXIT_S
        self._end_server(signal.SIGTERM, patience)

    def _fail(self, error: CogTritonError) -> None:
        self._failure = self._failure or error
        self._stop.set()
        self._end_server(signal.SIGUSR1, _LOSS_S)

    def _end_server(self, number: signal.Signals, patience: float) -> None:
        """Signal the server, and kill it if it is still there then."""
        if (server := self._server) is not None:
            server.signal(number)
            loop = asyncio.get_running_loop()
            loop.call_later(patience, server.signal, signal.SIGKILL)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_S)
            processes.reap_orphans()

    async def _serve_cog(self, port: int) -> None:
        environment = {**self._programs.cog_environment, "PORT": str(port)}

        async def run() -> str:
            self._serves_since[_COG] = time.monotonic()
            self._cog = Child(self._programs.cog_command, environment, cwd=self._programs.cwd)
            return await self._watch(_COG, self._cog)

        try:
            await self._repeat(_COG, run, self._cog_stop)
        except TritonStartFailed as error:
            self._fail(TritonUnavailable(f"{error.detail}; stopping"))

    def _restart_cog(self, order: RestartCog) -> None:
        fault = self._faults.get(_COG)
        if self._cog is None or fault is None or fault.done():
            return
        used = sum(map(cpu_time, self._cog.pids))
        if not order.late or used == self._cog_cpu:
            fault.set_result(order.reason)
        self._cog_cpu = used

    async def _stop_cog(self) -> None:
        self._cog_stop.set()
        if self._cog is not None:
            self._cog.signal(signal.SIGTERM)
            await self._cog.wait(_COG_EXIT_S)
            await self._cog.kill()
        self._report(StopCog())
