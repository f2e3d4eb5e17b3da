"""Triton supervisor: detects failures, has requests in flight wait, restarts with backoff."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cog_triton.errors import CogTritonError, TritonStartFailed, TritonUnavailable
from cog_triton.processes.restarts import STABLE_S, Restarts
from cog_triton.processes.waits import first_done
from cog_triton.serving.admission import Admission
from cog_triton.serving.failure_detection import FailureDetection, MemoryLimit
from cog_triton.settings import Settings
from cog_triton.triton.infer_stream import TokenTransport
from cog_triton.triton.server import TritonClient, TritonServer
from cog_triton.triton.step_stream import StepStreams

_log = logging.getLogger(__name__)


class SupervisorState(enum.StrEnum):
    """Lifecycle of the supervised Triton."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class Supervisor:
    """Watchdog of one Triton, in the loop that starts it.

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
        probe: Callable[..., Awaitable[None]],
        admission: Admission,
        on_failed: Callable[[CogTritonError], None],
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
        self._admission = admission
        self._on_failed = on_failed
        self._memory_limit = MemoryLimit(settings.triton_memory_limit, admission)
        self._detection = FailureDetection(server, client, transport, probe, admission, replicas)
        self._rule = Restarts(settings.triton_max_restarts)
        self._task: asyncio.Task[Any] | None = None
        self._ready_at = 0.0
        self._start_s = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self.restarts = 0
        """How often Triton was restarted after a failure."""
        self.planned_restarts = 0
        """How often it was restarted since it exceeded its memory limit."""
        self.state = SupervisorState.STARTING
        self.error: CogTritonError | None = None
        """Why Triton is not ready any more; None until the first failure and while it is ready."""

    async def start(self) -> None:
        """Start Triton; raises E2106 if that fails, and leaves no process then."""
        try:
            await self._start_server()
        except BaseException:
            await self.stop()
            raise
        self._task = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        await self.let_go()
        if self._task is not None:
            await asyncio.wait({self._task})
        if self.state is not SupervisorState.FAILED:
            self.state = SupervisorState.STOPPED
        await self._end()

    async def let_go(self) -> None:
        """Restart nothing from now on; end the connections that Triton's exit would wait for."""
        if self._task is not None:
            self._task.cancel()
        await self._transport.disconnect()
        await self._client.aclose()

    def engine_memory(self) -> Mapping[str, int]:
        """Host memory of engine processes; none where engines compute inside tritonserver."""
        engines = self._server.engines
        return engines.memory() if engines.chosen else {}

    @property
    def engines(self) -> int:
        """Number of engines that serve; 1 where they compute inside tritonserver."""
        engines = self._server.engines
        return engines.serving if engines.chosen else int(self.state is SupervisorState.READY)

    def check_engine(self) -> None:
        """Check the engine with a one-token request, since a request has failed."""
        self._detection.requested.set()

    async def _watch(self) -> None:
        try:
            await self._supervise()
        except Exception as failure:  # noqa: BLE001 - requests are to end, whatever it is
            _log.exception("supervision failed")
            self._give_up(f"supervision failed: {failure!r}")
            self._stop_requests()
        if self.error is not None and self.state is SupervisorState.FAILED:
            await self._end()
            self._on_failed(self.error)

    async def _end(self) -> None:
        self._stop_waiting()
        if self.state is not SupervisorState.FAILED:
            self._admission.close(TritonUnavailable("the server is stopping; try again"))
        await self._transport.disconnect()
        await self._server.stop()
        await self._client.aclose()

    async def _supervise(self) -> None:
        while self.state is SupervisorState.READY:
            excess = self._memory_limit.restart_due(self._server.root_pid)
            async with first_done(excess, self._detection.wait()) as (due, failed):
                pass
            if not due.cancelled():
                await self._restart_as_planned(due.result())
                continue
            failure = failed.result()
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
        self._detection.requested.set()  # who fared ill at another meanwhile is to go on, too

    async def _restart_as_planned(self, why: str) -> None:
        _log.info("Triton: %s; it is restarted as planned", why)
        self.state = SupervisorState.RESTARTING
        self._limit_wait()
        await self._transport.disconnect()
        await self._server.stop_triton()
        if (lacking := await self._start_again()) is not None:
            await self._restart(lacking, stable=True, engine_only=False)
            return
        self.planned_restarts += 1
        _log.info("Triton is ready again after %.1f s, as planned", self._start_s)

    async def _start_again(self, *, engine_only: bool = False) -> str | None:
        """Start; returns why it failed, for want of a disk or a descriptor perhaps, or None."""
        try:
            await self._start_server(engine_only=engine_only)
        except CogTritonError as error:
            return error.detail
        except OSError as error:
            return str(error)
        return None

    async def _start_server(self, *, engine_only: bool = False) -> None:
        """Start Triton, or wait for the engine that takes the place of one that died."""
        began = time.monotonic()
        start = self._server.wait_until_ready if engine_only else self._server.start
        await start(self._client.is_ready, self._verify)
        self._ready_at = time.monotonic()
        self._start_s = self._ready_at - began
        self._detection.requested.clear()
        self._stop_waiting()
        # Before readiness is told: a newcomer is served from then on.
        self._admission.open()
        self.error, self.state = None, SupervisorState.READY

    async def _verify(self) -> None:
        """Check an engine with a real request, as soon as it serves."""
        engines = self._server.engines
        while True:
            generations = await engines.wait_until_serving() if engines.chosen else {}
            await self._transport.open(generations)
            await self._detection.probe()
            if not engines.has_died:  # else the next check forgets that death
                return

    async def _restart(self, reason: str, *, stable: bool, engine_only: bool) -> None:
        """Restart until it is ready or given up."""
        blames = await self._detection.blames(of_engine=engine_only)
        counts = not (self._admission.resumes and self._admission.suspects == 1)
        while True:
            self._rule.failed(stable=stable, counts=counts)
            self._choose(reason)
            # A failed start says Triton's last lines itself.
            tail = "" if engine_only or "\n" in reason else f"\n{self._server.log_tail()}"
            _log.error("Triton: %s%s", reason, tail)
            self._stop_requests(blames=blames)
            if not engine_only:
                await self._server.kill()
                await self._transport.disconnect()
            if self.state is not SupervisorState.RESTARTING:
                return
            await asyncio.sleep(self._rule.pause)
            self.restarts += 1
            if (lacking := await self._start_again(engine_only=engine_only)) is None:
                break
            reason, stable, counts, engine_only = lacking, False, True, False
            await self._server.engines.kill()
        what = "The engine" if engine_only else "Triton"
        _log.info("%s is ready again after %.1f s", what, self._start_s)

    def _choose(self, reason: str) -> None:
        if self._rule.given_up:
            self._give_up(self._rule.sentence(reason))
        else:
            self.state = SupervisorState.RESTARTING
            self.error = TritonUnavailable(
                f"{_first_line(reason)}; Triton is being restarted, try again in"
                f" {math.ceil(self._rule.pause + self._start_s)} s"
            )

    def _give_up(self, why: str) -> None:
        self.state, self.error = SupervisorState.FAILED, TritonStartFailed(why)

    def _stop_requests(self, *, blames: bool = False) -> None:
        """Have all requests in flight wait for the next start, or fail."""
        assert self.error is not None
        if self.state is SupervisorState.RESTARTING and self._admission.resumes:
            self._limit_wait()
            self._admission.pause(self.error, blame=blames)
        elif self.state is SupervisorState.FAILED:
            why = _first_line(self.error.detail)
            _log.error("The server stops: %s", why)
            self._admission.close(TritonUnavailable(f"{why}; the server stops"))
        else:
            self._admission.close(self.error)

    def _limit_wait(self) -> None:
        """Have requests wait no longer than RESUME_TIMEOUT from now."""
        if self._deadline is None:
            timeout = self._settings.resume_timeout
            waited = f"waited no longer than {timeout:g} s (RESUME_TIMEOUT)"
            loop = asyncio.get_running_loop()
            error = TritonUnavailable(f"the engine is not back; {waited}; try again")
            self._deadline = loop.call_later(timeout, self._admission.close, error)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _first_line(text: str) -> str:
    """The part of a reason for clients; the other lines are from Triton's log."""
    return text.partition("\n")[0]
