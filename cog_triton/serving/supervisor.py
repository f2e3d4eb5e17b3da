"""Triton supervisor: detects failures, has requests in flight wait, restarts with backoff."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from cog_triton.errors import CogTritonError, TritonStartFailed, TritonUnavailable
from cog_triton.serving.admission import Admission
from cog_triton.serving.engine_checks import TICK_S, EngineChecks, Sick, done_within
from cog_triton.serving.memory_limit import MemoryLimit
from cog_triton.serving.triton_use import TritonUse
from cog_triton.settings import Settings
from cog_triton.triton.client import TritonClient
from cog_triton.triton.liveness import ProcessLiveness
from cog_triton.triton.replica_streams import ReplicaStreams
from cog_triton.triton.server import TritonServer
from cog_triton.triton.token_transport import TokenTransport

_log = logging.getLogger(__name__)

_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
STABLE_S = 5.0
"""Seconds of readiness after which a failure is no longer one in a row."""
_DEATH_S = 10.0


class SupervisorState(enum.StrEnum):
    """Lifecycle of the supervised Triton."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class _Failure(NamedTuple):
    """Failure, whether Triton itself is well, and the engine if others of it serve."""

    reason: str
    engine_only: bool
    replica: int | None = None


class Supervisor:
    """Watchdog of one Triton, on its own thread and event loop; methods are thread-safe.

    A failure is a process that died or was stopped, a readiness probe without an answer while no
    stream receives a byte either, or, after a failed request, two of one token that fail, too.
    Then admission is paused, so that requests in flight wait, at most RESUME_TIMEOUT; without
    RESUME it is closed, which fails them with E2105. Where only the engine's process died or is at
    fault, the engine keeper replaces it; else all of Triton's processes are killed, and it is
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
        replicas: ReplicaStreams | None = None,
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
        self._triton_use = TritonUse(settings.triton_grpc_port)
        self._loop = asyncio.new_event_loop()
        self._checks = EngineChecks(transport, probe, admission, replicas)
        self._started: Future[None] = Future()
        self._restarts_disabled = False
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._main, name="triton-supervisor", daemon=True)
        self._ready_at = 0.0
        self._start_s = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self.state = SupervisorState.STARTING
        self.restarts = 0
        """How often Triton was restarted after a failure."""
        self.planned_restarts = 0
        """How often it was restarted since it exceeded its memory limit."""
        self.error: CogTritonError | None = None
        """Why Triton is not ready any more; None until the first failure and while it is ready."""

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
        self._restarts_disabled = True
        self._memory_limit.disable()

    def engine_memory(self) -> Mapping[str, int]:
        """Host memory of engine processes; none where engines compute inside tritonserver."""
        keeper = self._server.keeper
        return keeper.engine_memory() if keeper is not None else {}

    @property
    def engines(self) -> int:
        """Number of engines that serve; 1 where they compute inside tritonserver."""
        keeper = self._server.keeper
        return keeper.serving if keeper is not None else int(self.state is SupervisorState.READY)

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
                self.state = SupervisorState.STOPPED
                self._started.set_exception(failure)
                return
            self._started.set_result(None)
            failure = self._run_task(self._supervise())
            if isinstance(failure, asyncio.CancelledError):
                self.state = SupervisorState.STOPPED
            elif failure is not None:
                _log.error("supervision failed", exc_info=failure)
                self._give_up(f"supervision failed: {failure!r}")
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
        failures = 0
        while self.state is SupervisorState.READY:
            watch = asyncio.ensure_future(self._wait_for_failure())
            if await self._restarted_as_planned(watch):
                continue
            failure = watch.result()
            if failure.replica is not None:
                self._lose(failure.replica, failure.reason)
                continue
            stable = time.monotonic() - self._ready_at >= STABLE_S
            blamed = self._admission.resumes and self._admission.suspects == 1
            failures = await self._restart(
                failure._replace(reason=failure.reason + self._server.oom_hint()),
                1 if stable else max(1, failures + (not blamed)),
            )

    def _lose(self, replica: int, reason: str) -> None:
        """One of several engines has died; Triton's stub leases another in its place."""
        assert self._replicas is not None
        _log.error("engine %d: %s%s; others serve", replica, reason, self._server.oom_hint())
        self.restarts += 1
        self._replicas.forget(replica)
        self._admission.lose(replica, blame=not self._triton_use.recent())
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
        self.state = SupervisorState.RESTARTING
        self._limit_wait()
        self._transport.disconnect()
        await self._server.stop_triton()
        try:
            await self._start_server()
        except TritonStartFailed as error:
            await self._restart(_Failure(error.detail, engine_only=False), 1)
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
        self.error = None
        self.state = SupervisorState.READY

    async def _verify(self) -> None:
        """Check the engine with a real request, as soon as it is leased to Triton.

        E2105 is no answer yet: on a busy machine a stub may still be at the last steps of an engine
        that has died, when another is leased already.
        """
        try:
            await self._check_leased()
        except TritonUnavailable as error:
            _log.info("the first request is sent again: %s", error)
            self._transport.disconnect()
            await self._check_leased()

    async def _check_leased(self) -> None:
        if (keeper := self._server.keeper) is not None:
            await keeper.wait_until_leased()
            keeper.forget_deaths()
        await asyncio.to_thread(self._open_and_probe)

    def _open_and_probe(self) -> None:
        self._transport.open()
        self._probe()

    async def _restart(self, failure: _Failure, failures: int) -> int:
        """Restart until it is ready, stopped or given up; returns the failures so far."""
        reason, engine_only, _ = failure
        while True:
            pause = min(_BACKOFF_S * 2 ** (failures - 2), _MAX_BACKOFF_S) if failures > 1 else 0.0
            # A failed start says Triton's last lines itself.
            tail = "" if engine_only or "\n" in reason else f"\n{self._server.log_tail()}"
            _log.error("Triton: %s%s", reason, tail)
            self._stop_requests(reason, failures, pause)
            self._transport.disconnect()
            if not engine_only:
                self._server.kill()
            if self.state is not SupervisorState.RESTARTING:
                return failures
            await asyncio.sleep(pause)
            self.restarts += 1
            try:
                await self._start_server(engine_only=engine_only)
            except (TritonStartFailed, OSError) as error:  # OSError: no descriptor, no memory
                reason = error.detail if isinstance(error, TritonStartFailed) else str(error)
                engine_only = False
                failures += 1
                self._server.kill_engines()
            else:
                break
        what = "The engine" if engine_only else "Triton"
        _log.info("%s is ready again after %.1f s", what, self._start_s)
        return failures

    def _stop_requests(self, reason: str, failures: int, pause: float) -> None:
        """Choose the next state, and have all requests in flight wait or fail."""
        if self._restarts_disabled:
            self.state = SupervisorState.STOPPED
            self.error = TritonUnavailable(f"{_first_line(reason)}; the server is stopping")
        elif failures > self._settings.triton_max_restarts:
            self._give_up(
                f"given up after {failures - 1} restarts in a row (TRITON_MAX_RESTARTS): {reason}"
            )
            return
        else:
            self.state = SupervisorState.RESTARTING
            self.error = TritonUnavailable(
                f"{_first_line(reason)}; Triton is being restarted, try again in"
                f" {math.ceil(pause + self._start_s)} s"
            )
            if self._admission.resumes:
                self._limit_wait()
                self._admission.pause(self.error, blame=not self._triton_use.recent())
                return
        self._admission.close(self.error)

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

    def _give_up(self, why: str) -> None:
        _log.error("The server stops: %s", _first_line(why))
        self.state, self.error = SupervisorState.FAILED, TritonStartFailed(why)
        self._admission.close(TritonUnavailable(f"{_first_line(why)}; the server stops"))

    async def _wait_for_failure(self) -> _Failure:
        """Wait for the first sign of failure, and describe it."""
        keeper = self._server.keeper
        with ProcessLiveness(self._server.root_pid) as processes:
            deaths: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(processes.wait_for_failure())
            ]
            if keeper is not None:
                deaths.append(asyncio.ensure_future(keeper.wait_for_death()))
            check = asyncio.ensure_future(self._checks.watch())
            watches = [*deaths, check, asyncio.ensure_future(self._watch_readiness())]
            try:
                done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
                if done.isdisjoint(deaths):
                    # What is dead refuses requests, too, but its death is the better reason.
                    await asyncio.wait(deaths, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                first = next(watch for watch in watches if watch.done())
                found = first.result()
                if isinstance(found, str):
                    return _Failure(found, engine_only=False)
                if keeper is None or keeper.lost:
                    return _Failure(found.reason, engine_only=False)
                if isinstance(found, Sick):
                    keeper.kill_engine(found.reason, found.replica)
                    if found.replica is None:
                        return _Failure(found.reason, engine_only=True)
                    _, of_engine = deaths
                    await asyncio.wait({of_engine}, timeout=_DEATH_S)
                    if not of_engine.done():
                        return _Failure(found.reason, engine_only=True)
                    found = of_engine.result()
                others = self._replicas is not None and found.serving
                return _Failure(found.reason, True, found.replica if others else None)
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)

    async def _watch_readiness(self) -> str:
        """Readiness probe: fails on no answer in time, or on two answers of not ready."""
        while True:
            await asyncio.sleep(self._settings.triton_probe_period)
            self._triton_use.look()
            began = time.monotonic()
            probe = asyncio.ensure_future(self._client.is_ready())
            limit = self._settings.triton_probe_timeout
            if not await done_within(probe, limit):
                if self._transport.last_token_at < began:
                    return f"tritonserver did not answer for {limit:g} s (TRITON_PROBE_TIMEOUT)"
            elif not probe.result() and not await self._client.is_ready():
                return "tritonserver says that it is not ready"


def _first_line(text: str) -> str:
    """The part of a reason for clients; the other lines are from Triton's log."""
    return text.partition("\n")[0]
