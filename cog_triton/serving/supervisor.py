"""Triton supervisor: detects failures, has requests in flight wait, restarts with backoff."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.serving.admission import Admission
from cog_triton.serving.failure_detection import EngineChecks, FailureDetection, MemoryLimit
from cog_triton.serving.lifecycle import Lifecycle, SupervisorState, first_line
from cog_triton.settings import Settings
from cog_triton.triton.server import TritonClient, TritonServer
from cog_triton.triton.step_stream import StepStreams
from cog_triton.triton.token_transport import TokenTransport

_log = logging.getLogger(__name__)

STABLE_S = 5.0
"""Seconds of readiness after which a failure is no longer one in a row."""
_NOT_STARTED = (CogTritonError, OSError)
"""A start that failed, whatever was lacking: Triton, disk, descriptors, memory; another may not."""


class Supervisor:
    """Watchdog of one Triton, on its own thread and event loop; methods are thread-safe.

    A failure is a process that died or was stopped, a readiness probe without an answer while no
    stream receives a byte either, or, after a failed request, two of one token that fail, too.
    Then admission is paused, so that requests in flight wait, at most RESUME_TIMEOUT; without
    RESUME it is closed, which fails them with E2105. Where only the engine's process died or is at
    fault, another takes its place; else all of Triton's processes are killed, and it is
    restarted on the same ports, at once and then with a backoff that doubles from 0.5 s to 30 s.
    It gives up after TRITON_MAX_RESTARTS restarts in a row that brought less than 5 s of readiness;
    a death for which a single request is to blame does not count.
    With `replicas`, the death of an engine beside which others serve stops nothing: its requests go
    on there.
    """

    def __init__(
        self,
        settings: Settings,
        server: TritonServer,
        client: TritonClient,
        transport: TokenTransport,
        probe: Callable[..., None],
        admission: Admission,
        on_failed: Callable[[], None],
        replicas: StepStreams | None = None,
    ) -> None:
        """`probe` generates one token over `transport`; `on_failed` is called after giving up.

        `replicas` are the `transport` of several engines, each of which `probe` takes as another
        ``transport``.
        """
        self._replicas = replicas
        self._settings = settings
        self._server = server
        self._client = client
        self._transport = transport
        self._probe = probe
        self._admission = admission
        self._on_failed = on_failed
        self._memory_limit = MemoryLimit(settings.triton_memory_limit, admission)
        self._loop = asyncio.new_event_loop()
        self._checks = EngineChecks(transport, probe, admission, replicas)
        self._detection = FailureDetection(
            settings, server, client, transport, self._checks, replicas
        )
        self._life = Lifecycle(settings.triton_max_restarts)
        self._started: Future[None] = Future()
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._main, name="triton-supervisor", daemon=True)
        self._ready_at = 0.0
        self._start_s = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self.restarts = 0
        """How often Triton was restarted after a failure."""
        self.planned_restarts = 0
        """How often it was restarted since it exceeded its memory limit."""

    @property
    def state(self) -> SupervisorState:
        """Where in its lifecycle Triton is."""
        return self._life.state

    @property
    def error(self) -> CogTritonError | None:
        """Why Triton is not ready any more; None until the first failure and while it is ready."""
        return self._life.error

    async def start(self) -> None:
        """Start Triton; raises E2106 if that fails, and leaves no process then."""
        self._thread.start()
        try:
            await asyncio.wrap_future(self._started)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop Triton and its supervision."""
        self.disable_restarts()
        self._call_on_loop(lambda: self._task.cancel() if self._task else None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def disable_restarts(self) -> None:
        """Do not restart Triton any more."""
        self._life.restarts_disabled = True
        self._memory_limit.disable()

    def engine_memory(self) -> Mapping[str, int]:
        """Host memory of engine processes; none where engines compute inside tritonserver."""
        engines = self._server.engines
        return engines.memory() if engines is not None else {}

    @property
    def engines(self) -> int:
        """Number of engines that serve; 1 where they compute inside tritonserver."""
        engines = self._server.engines
        return engines.serving if engines is not None else int(self.state is SupervisorState.READY)

    def check_engine(self) -> None:
        """Check the engine with a one-token request, since a request has failed."""
        self._call_on_loop(self._checks.requested.set)

    def _call_on_loop(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and Triton has ended
            self._loop.call_soon_threadsafe(function)

    def _main(self) -> None:
        self._started.set_running_or_notify_cancel()
        try:
            failure = self._run_task(self._start_server())
            if failure is not None:
                self._life.state = SupervisorState.STOPPED
                self._started.set_exception(failure)
                return
            self._started.set_result(None)
            failure = self._run_task(self._supervise())
            if isinstance(failure, asyncio.CancelledError):
                self._life.state = SupervisorState.STOPPED
            elif failure is not None:
                _log.error("supervision failed", exc_info=failure)
                self._life.give_up(f"supervision failed: {failure!r}")
                self._stop_requests()
        finally:
            self._stop_waiting()
            if self.state is not SupervisorState.FAILED:
                self._admission.close(TritonUnavailable("the server is stopping; try again"))
            self._transport.close()
            self._run_task(self._server.stop())
            self._run_task(self._client.aclose())
            self._run_task(self._loop.shutdown_default_executor())
            self._loop.close()
        if self.state is SupervisorState.FAILED:
            self._on_failed()

    def _run_task(self, work: Coroutine[Any, Any, None]) -> BaseException | None:
        """Run `work` to its end; the exception that ended it, if any."""
        self._task = self._loop.create_task(work)
        self._loop.run_until_complete(asyncio.wait({self._task}))
        if self._task.cancelled():
            return asyncio.CancelledError()
        return self._task.exception()

    async def _supervise(self) -> None:
        while self.state is SupervisorState.READY:
            watch = asyncio.ensure_future(self._detection.wait())
            if await self._restarted_as_planned(watch):
                continue
            failure = watch.result()
            if failure.replica is not None:
                await self._lose(failure.replica, failure.reason)
                continue
            stable = time.monotonic() - self._ready_at >= STABLE_S
            reason = failure.reason + self._server.oom_hint()
            await self._restart(reason, stable=stable, engine_only=failure.engine_only)

    async def _lose(self, replica: int, reason: str) -> None:
        """One of several engines has died; another takes its place."""
        assert self._replicas is not None
        _log.error("engine %d: %s%s; others serve", replica, reason, self._server.oom_hint())
        self.restarts += 1
        self._replicas.forget(replica)
        self._admission.lose(replica, blame=await self._detection.blames(replica, of_engine=True))
        self._checks.requested.set()  # who fared ill at another engine meanwhile is to go on, too

    async def _restarted_as_planned(self, watch: asyncio.Future[Any]) -> bool:
        """Wait for a failure, and restart Triton if it exceeds its memory limit before."""
        due: asyncio.Future[Any] = asyncio.ensure_future(
            self._memory_limit.restart_due(self._server.root_pid)
        )
        try:
            await asyncio.wait({due, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not due.done():
                return False
            why = due.result()
        finally:
            due.cancel()
            if due.done():
                watch.cancel()
        _log.info("Triton: %s; it is restarted as planned", why)
        self._life.restart_planned()
        self._limit_wait()
        self._transport.disconnect()
        await self._server.stop_triton()
        try:
            await self._start_server()
        except _NOT_STARTED as error:
            detail = error.detail if isinstance(error, CogTritonError) else str(error)
            await self._restart(detail, stable=True, engine_only=False)
        else:
            self.planned_restarts += 1
            _log.info("Triton is ready again after %.1f s, as planned", self._start_s)
        return True

    async def _start_server(self, *, engine_only: bool = False) -> None:
        """Start Triton, or wait for the engine that takes the place of one that died."""
        began = time.monotonic()
        start = self._server.wait_until_ready if engine_only else self._server.start
        await start(self._client.is_ready, self._verify)
        self._ready_at = time.monotonic()
        self._start_s = self._ready_at - began
        self._checks.requested.clear()
        self._stop_waiting()
        # Before readiness is told: a newcomer is served from then on.
        self._admission.open()
        self._life.ready()

    async def _verify(self) -> None:
        """Check an engine with a real request, as soon as it serves."""
        engines = self._server.engines
        while True:
            generations = {} if engines is None else await engines.wait_until_serving()
            await asyncio.to_thread(self._open_and_probe, generations)
            if engines is None or not engines.has_died:  # else the next check forgets that death
                return

    def _open_and_probe(self, generations: Mapping[int, int]) -> None:
        self._transport.open(generations)
        self._probe()

    async def _restart(self, reason: str, *, stable: bool, engine_only: bool) -> None:
        """Restart until it is ready, stopped or given up."""
        life = self._life
        blames = await self._detection.blames(of_engine=engine_only)
        blamed = self._admission.resumes and self._admission.suspects == 1
        life.failed(reason, self._start_s, stable=stable, blamed=blamed)
        while True:
            # A failed start says Triton's last lines itself.
            tail = "" if engine_only or "\n" in reason else f"\n{self._server.log_tail()}"
            _log.error("Triton: %s%s", reason, tail)
            self._stop_requests(blames=blames)
            if not engine_only:
                self._server.kill()
                self._transport.disconnect()
            if life.state is not SupervisorState.RESTARTING:
                return
            await asyncio.sleep(life.pause)
            self.restarts += 1
            try:
                await self._start_server(engine_only=engine_only)
            except _NOT_STARTED as error:
                reason = error.detail if isinstance(error, CogTritonError) else str(error)
                engine_only = False
                life.start_failed(reason, self._start_s)
                self._server.kill_engines()
            else:
                break
        what = "The engine" if engine_only else "Triton"
        _log.info("%s is ready again after %.1f s", what, self._start_s)

    def _stop_requests(self, *, blames: bool = False) -> None:
        """Have all requests in flight wait for the next start, or fail."""
        refusal = self._life.refusal
        if self.state is SupervisorState.RESTARTING and self._admission.resumes:
            self._limit_wait()
            self._admission.pause(refusal, blame=blames)
            return
        if self.state is SupervisorState.FAILED:
            _log.error("The server stops: %s", first_line(self.error.detail if self.error else ""))
        self._admission.close(refusal)

    def _limit_wait(self) -> None:
        """Have requests wait no longer than RESUME_TIMEOUT from now."""
        if self._deadline is None:
            timeout = self._settings.resume_timeout
            self._deadline = self._loop.call_later(timeout, self._end_wait)

    def _end_wait(self) -> None:
        waited = f"waited no longer than {self._settings.resume_timeout:g} s (RESUME_TIMEOUT)"
        self._admission.close(TritonUnavailable(f"the engine is not back; {waited}; try again"))

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
