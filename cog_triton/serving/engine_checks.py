"""Engine checks: the canary at start, one-token requests after a request that failed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from cog_triton.artifact import canary
from cog_triton.engines.base import EngineFamily
from cog_triton.errors import CogTritonError
from cog_triton.serving.admission import Admission
from cog_triton.serving.generate import TextGenerator
from cog_triton.triton.step_stream import ReplicaStreams
from cog_triton.triton.token_transport import TokenTransport

_log = logging.getLogger(__name__)


def check_canary(family: EngineFamily, generator: TextGenerator, *, required: bool) -> None:
    """Send the canary of the engine directory, if it has one; blocks.

    A failure is logged, for another machine's arithmetic may break a near tie otherwise, and
    raised only where it is `required`, as while the engine is to take the place of one that serves.

    Raises:
        CogTritonError: E2112 if the answer differs, or what the request failed with.
    """
    try:
        expected = canary.load(family.directory)
        if expected is None:
            return
        expected.require(generator.greedy_ids(expected.input_ids, len(expected.output_ids)))
    except CogTritonError as error:
        if required:
            raise
        _log.warning("%s", error)
    else:
        _log.info("the canary of %d tokens was answered as built", len(expected.output_ids))


TICK_S = 0.1
_TIMEOUT_S = 30.0
_PAUSE_S = 5.0


class Sick(NamedTuple):
    """An engine that fails its checks, None for the only one, and how."""

    replica: int | None
    reason: str


class EngineChecks:
    """Checks of the engines behind `transport`, once they are `requested`."""

    def __init__(
        self,
        transport: TokenTransport,
        probe: Callable[..., None],
        admission: Admission,
        replicas: ReplicaStreams | None,
    ) -> None:
        """See `Supervisor`."""
        self.requested = asyncio.Event()
        self.probe = probe
        self._transport = transport
        self._admission = admission
        self._replicas = replicas

    async def watch(self) -> Sick:
        """Engine checks after failed requests; returns the first engine that fails them."""
        while True:
            await self.requested.wait()
            self.requested.clear()
            if self._replicas is None:
                if reason := await self._check(self._transport, self.probe):
                    return Sick(None, reason)
            else:
                # What has died is known then, and its requests go on as those of a dead engine.
                await asyncio.sleep(TICK_S)
                for replica, stream in self._replicas.serving.items():
                    probe = partial(self.probe, transport=stream)
                    reason = await self._check(stream, probe)
                    if reason and replica in self._replicas.serving:
                        return Sick(replica, reason)
            self._admission.release()
            await asyncio.sleep(_PAUSE_S)

    async def _check(self, transport: TokenTransport, probe: Callable[[], None]) -> str:
        """Check of an engine: what is wrong with it, if two one-token requests fail; else blank.

        The first of them may have gone the way of the failed one, a connection that was breaking.
        """
        for last in (False, True):
            began = time.monotonic()
            check = asyncio.ensure_future(asyncio.to_thread(probe))
            if not await done_within(check, _TIMEOUT_S):
                if transport.last_token_at < began:
                    silence = f"silent for {_TIMEOUT_S:g} s"
                    return f"a request failed, and the engine has been {silence}"
                break
            if not isinstance(error := check.exception(), CogTritonError):
                break
            if last:
                return f"the engine fails every request: {error}"
        return ""


async def done_within(task: asyncio.Future[Any], seconds: float) -> bool:
    """Whether `task` is done in time, counted in ticks of this loop, so that its own delays
    are not taken for the task's."""
    # Its failure may come when nobody waits any more, which asyncio would log.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    for _ in range(math.ceil(seconds / TICK_S)):
        if (await asyncio.wait({task}, timeout=TICK_S))[0]:
            return True
    task.cancel()
    return False
