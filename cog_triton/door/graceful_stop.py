"""Graceful stop of the front door: one way for SIGTERM, SIGINT and POST /shutdown.

The first request to stop drains every API: what arrives from then on gets 503 (E2105), connections
that ask for nothing are closed, and what runs may end within DRAIN_TIMEOUT, whatever happens to the
engine meanwhile. Then the chains behind the door are stopped. A second signal stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cog_triton.door.client_connection import Connections
from cog_triton.door.upstream import Upstreams

_POLL_S = 0.02
_LOG = logging.getLogger(__name__)


class GracefulStop:
    """Stop of all `upstreams`, once it is asked for; `seconds` is DRAIN_TIMEOUT."""

    def __init__(self, upstreams: Upstreams, connections: Connections, seconds: float) -> None:
        self._upstreams = upstreams
        self._connections = connections
        self._seconds = seconds
        self._before: list[Callable[[], None]] = []
        self._asked = asyncio.Event()
        self._deadline = 0.0
        self._signalled = self._hurried = False
        upstreams.ask_to_stop = self._asked.set

    def before(self, function: Callable[[], None]) -> None:
        """Have `function` called first: it ends what would begin a chain, or wait for one."""
        self._before.append(function)

    def on_signal(self) -> None:
        """Stop; at the second signal, at once."""
        if self._signalled and not self._hurried:
            self._hurried = True
            loop = asyncio.get_running_loop()
            for upstream in self._upstreams:
                if upstream.chain is not None:
                    loop.run_in_executor(None, upstream.chain.reaper.kill)
        self._signalled = True
        self._asked.set()

    async def run(self) -> None:
        """Wait until it is asked for, then drain and stop everything behind the door."""
        await self._asked.wait()
        self._deadline = time.monotonic() + self._seconds
        _LOG.info("stopping: what runs may end within %g s (DRAIN_TIMEOUT)", self._seconds)
        self._upstreams.stopping = True
        self._connections.refuse_reuse()
        for function in self._before:
            function()
        more = self.patience(0.0)
        while self._connections.answering and self._lasts and more():
            await asyncio.sleep(_POLL_S)
        left = max(0.0, self._deadline - time.monotonic())
        await asyncio.gather(*(one.drain(left) for one in self._upstreams))

    def patience(self, least: float) -> Callable[[], bool]:
        """Tells whether to wait on: for the rest of DRAIN_TIMEOUT, or for `least` seconds from now.

        Not after a second signal.
        """
        end = max(self._deadline, time.monotonic() + least)
        return lambda: not self._hurried and time.monotonic() < end

    @property
    def _lasts(self) -> bool:
        """Whether an answer may still come."""
        return not self._hurried and any(one.exit_code() is None for one in self._upstreams)
