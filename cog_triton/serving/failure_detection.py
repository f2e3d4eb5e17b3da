"""Failure detection of Triton and its engines: deaths, silence, failed checks, excess memory.

A stub that holds too much memory cannot be replaced by itself: its death is tritonserver's. So all
of Triton is restarted, as planned, at a moment when that costs least.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from cog_triton.errors import CogTritonError
from cog_triton.processes.waits import first_done
from cog_triton.serving.admission import Admission
from cog_triton.triton import server as triton_server
from cog_triton.triton.infer_stream import TokenTransport
from cog_triton.triton.server import TritonClient, TritonServer
from cog_triton.triton.step_stream import EngineChannel, StepStreams

_log = logging.getLogger(__name__)

_TICK_S = 0.1
_TIMEOUT_S = 30.0
_PAUSE_S = 5.0
_DEATH_S = 10.0
_OTHERS_S = 5.0
_SETTLING_TICKS, _SETTLING_S = 50, 0.02


class Failure(NamedTuple):
    """Failure, whether Triton itself is well, and the engine if others of it serve."""

    reason: str
    engine_only: bool = False
    replica: int | None = None


class FailureDetection:
    """Watch over one Triton, and checks of its engines once they are `requested`.

    It has nothing restarted.
    """

    _period, _timeout = 1.0, 3.0
    """Seconds between probes of Triton, and until one without an answer means that it hangs."""

    def __init__(
        self,
        server: TritonServer,
        client: TritonClient,
        transport: TokenTransport,
        probe: Callable[..., Awaitable[None]],
        admission: Admission,
        replicas: StepStreams | None,
    ) -> None:
        self.requested = asyncio.Event()
        self.probe = probe
        self._server = server
        self._client = client
        self._transport = transport
        self._admission = admission
        self._replicas = replicas

    async def wait(self) -> Failure:
        """Wait for the first sign of failure, and describe it; kills an engine that is at fault."""
        engines = self._server.engines
        ends = self._server.wait_for_failure(), engines.wait_for_death()
        async with first_done(*ends, self._watch_engines(), self._watch_readiness()) as watches:
            deaths = _, of_engine = watches[:2]
            if not any(death.done() for death in deaths):
                # What is dead refuses requests, too, but its death is the better reason.
                await asyncio.wait(deaths, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            found = next(watch for watch in watches if watch.done()).result()
            if isinstance(found, str):
                return Failure(found)
            if not engines.chosen:
                return Failure(found.reason)
            if isinstance(found, Failure):
                engines.end(found.reason, found.replica)
                if found.replica is not None:
                    await asyncio.wait({of_engine}, timeout=_DEATH_S)
                if found.replica is None or not of_engine.done():
                    return Failure(found.reason, engine_only=True)
                found = of_engine.result()
            replica = found.replica if self._replicas is not None and found.serving else None
            return Failure(found.reason, found.lasted is not None, replica)

    async def blames(self, replica: int | None = None, *, of_engine: bool) -> bool:
        """Whether requests of ours may be blamed for a death: no others ran, nor did just now.

        An engine may have said so last; that has to be here first.
        """
        for _ in range(_SETTLING_TICKS):
            if not of_engine or self._transport.has_ended(replica):
                break
            await asyncio.sleep(_SETTLING_S)
        if time.monotonic() - self._transport.others_at >= _OTHERS_S:
            return True
        _log.warning("no stream is blamed for this: Triton's own API was in use")
        return False

    async def _watch_engines(self) -> Failure:
        """Engine checks after failed requests; returns the first engine that fails them."""
        while True:
            await self.requested.wait()
            self.requested.clear()
            if self._replicas is not None:
                # What has died is known then, and its requests go on as those of a dead engine.
                await asyncio.sleep(_TICK_S)
            for replica, transport in self._engines().items():
                reason = await self._check(transport)
                if reason and replica in self._engines():
                    return Failure(reason, engine_only=True, replica=replica)
            self._admission.release()
            await asyncio.sleep(_PAUSE_S)

    def _engines(self) -> Mapping[Any, TokenTransport | EngineChannel]:
        """The ways to engines that serve, by replica, None for the only one."""
        return {None: self._transport} if self._replicas is None else self._replicas.serving

    async def _check(self, transport: TokenTransport | EngineChannel) -> str:
        """Check of an engine: what is wrong with it, if two one-token requests fail; else blank.

        The first of them may have gone the way of the failed one, a connection that was breaking.
        """
        for last in (False, True):
            began = time.monotonic()
            check = asyncio.ensure_future(self.probe(transport=transport))
            if not await _done_within(check, _TIMEOUT_S):
                if transport.last_token_at < began:
                    silence = f"silent for {_TIMEOUT_S:g} s"
                    return f"a request failed, and the engine has been {silence}"
                break
            if not isinstance(error := check.exception(), CogTritonError):
                break
            if last:
                return f"the engine fails every request: {error}"
        return ""

    async def _watch_readiness(self) -> str:
        """Readiness probe: fails on no answer in time, or on two answers of not ready."""
        while True:
            await asyncio.sleep(self._period)
            began = time.monotonic()
            probe = asyncio.ensure_future(self._look())
            if not await _done_within(probe, limit := self._timeout):
                if self._transport.last_token_at < began:
                    return f"tritonserver did not answer for {limit:g} s"
            elif not probe.result() and not await self._client.is_ready():
                return "tritonserver says that it is not ready"

    async def _look(self) -> bool:
        """Whether Triton is ready; notes whether an engine inside it has requests of others."""
        if not self._server.engines.chosen:
            self._transport.note_active(await self._client.active_requests())
        return await self._client.is_ready()


async def _done_within(task: asyncio.Future[Any], seconds: float) -> bool:
    """Whether `task` is done in time, counted in ticks of this loop, so that its own delays
    are not taken for the task's."""
    # Its failure may come when nobody waits any more, which asyncio would log.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    for _ in range(math.ceil(seconds / _TICK_S)):
        if (await asyncio.wait({task}, timeout=_TICK_S))[0]:
            return True
    task.cancel()
    return False


_PERIOD_S = 2.0
_QUIET_WAIT_S = 300.0
_POLL_S = 0.1


class MemoryLimit:
    """Watch over the anonymous memory of each of Triton's processes, the engine's not included."""

    def __init__(self, mebibytes: int | None, admission: Admission) -> None:
        """Without `mebibytes` there is no limit."""
        self._limit = mebibytes
        self._admission = admission

    async def restart_due(self, root: int) -> str:
        """Wait until Triton, below the process `root`, exceeds the limit; describes the excess.

        It returns when nothing runs, or after five minutes if generations can go on afterwards,
        and has admission control hold all requests then. A limit that is exceeded from the start
        is ignored, with a warning.
        """
        if at_start := await self._excess(root):
            _log.warning("%s (TRITON_MEMORY_LIMIT) when just started; ignored", at_start)
            self._limit = None
        while not (why := await self._excess(root)):
            await asyncio.sleep(_PERIOD_S)
        _log.warning("Triton: %s (TRITON_MEMORY_LIMIT); it is restarted when nothing runs", why)
        exceeded = time.monotonic()
        while self._limit is None or not self._admission.hold(
            interrupt=time.monotonic() - exceeded > _QUIET_WAIT_S
        ):
            await asyncio.sleep(_POLL_S)
        return why

    async def _excess(self, root: int) -> str:
        try:
            return await asyncio.to_thread(_excess, root, self._limit) if self._limit else ""
        except OSError as error:  # no file descriptor is left to look with
            _log.warning("Triton's memory is not known: %s", error)
            return ""


def _excess(root: int, limit: int) -> str:
    """Which process below `root` exceeds `limit`, in MiB, and by what; blank if none does."""
    for pid, name in triton_server.named_processes(root).items():
        held = triton_server.anonymous_bytes(pid) >> 20
        if held > limit:
            return f"{name} (process {pid}) holds {held} MiB, more than {limit}"
    return ""
