"""Failure detection of Triton and its engines: deaths, silence, engines that fail their checks."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from cog_triton.serving.engine_checks import TICK_S, EngineChecks, Sick, done_within
from cog_triton.serving.triton_use import TritonUse
from cog_triton.settings import Settings
from cog_triton.triton.liveness import ProcessLiveness
from cog_triton.triton.server import TritonClient, TritonServer
from cog_triton.triton.step_stream import ReplicaStreams
from cog_triton.triton.token_transport import TokenTransport

_DEATH_S = 10.0


class Failure(NamedTuple):
    """Failure, whether Triton itself is well, and the engine if others of it serve."""

    reason: str
    engine_only: bool
    replica: int | None = None


class FailureDetection:
    """Watch over one Triton; it has nothing restarted."""

    def __init__(
        self,
        settings: Settings,
        server: TritonServer,
        client: TritonClient,
        transport: TokenTransport,
        checks: EngineChecks,
        replicas: ReplicaStreams | None,
    ) -> None:
        """See `Supervisor`."""
        self.checks = checks
        self.triton_use = TritonUse(settings.triton_grpc_port)
        self._period = settings.triton_probe_period
        self._timeout = settings.triton_probe_timeout
        self._server = server
        self._client = client
        self._transport = transport
        self._replicas = replicas

    async def wait(self) -> Failure:
        """Wait for the first sign of failure, and describe it; kills an engine that is at fault."""
        keeper = self._server.keeper
        with ProcessLiveness(self._server.root_pid) as processes:
            deaths: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(processes.wait_for_failure())
            ]
            if keeper is not None:
                deaths.append(asyncio.ensure_future(keeper.wait_for_death()))
            check = asyncio.ensure_future(self.checks.watch())
            watches = [*deaths, check, asyncio.ensure_future(self._watch_readiness())]
            try:
                done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
                if done.isdisjoint(deaths):
                    # What is dead refuses requests, too, but its death is the better reason.
                    await asyncio.wait(deaths, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                first = next(watch for watch in watches if watch.done())
                found = first.result()
                if isinstance(found, str):
                    return Failure(found, engine_only=False)
                if keeper is None or keeper.lost:
                    return Failure(found.reason, engine_only=False)
                if isinstance(found, Sick):
                    keeper.kill_engine(found.reason, found.replica)
                    if found.replica is None:
                        return Failure(found.reason, engine_only=True)
                    _, of_engine = deaths
                    await asyncio.wait({of_engine}, timeout=_DEATH_S)
                    if not of_engine.done():
                        return Failure(found.reason, engine_only=True)
                    found = of_engine.result()
                others = self._replicas is not None and found.serving
                return Failure(found.reason, True, found.replica if others else None)
            finally:
                for watch in watches:
                    watch.cancel()
                await asyncio.gather(*watches, return_exceptions=True)

    async def _watch_readiness(self) -> str:
        """Readiness probe: fails on no answer in time, or on two answers of not ready."""
        while True:
            await asyncio.sleep(self._period)
            self.triton_use.look()
            began = time.monotonic()
            probe = asyncio.ensure_future(self._client.is_ready())
            limit = self._timeout
            if not await done_within(probe, limit):
                if self._transport.last_token_at < began:
                    return f"tritonserver did not answer for {limit:g} s (TRITON_PROBE_TIMEOUT)"
            elif not probe.result() and not await self._client.is_ready():
                return "tritonserver says that it is not ready"
