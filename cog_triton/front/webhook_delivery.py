"""Webhooks of one prediction: in order, throttled, the last one retried with backoff.

coglet 0.23.1 posts each event in a task of its own and throttles no output: 100 tokens are 100
posts, which overtake one another. What is documented, and done here: start and end at once, output
and logs at most once in 500 ms, the end retried. Each event is a snapshot of the whole prediction,
so that the newest stands for all before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cog_triton.errors import InvalidArgument
from cog_triton.system.redaction import redact_address

_INTERVAL_S = 0.5
_TIMEOUT_S = 10.0
_LAST_TIMEOUT_S = 30.0
_RETRIES = 12
_BACKOFF_S = 0.1
_RETRIED = frozenset({429, 500, 502, 503, 504})  # Cog's own list, of its webhooks
_FORGOTTEN_S = 3600.0
_OUTPUT = b'"output":'
_RUNNING = (b'"status":"starting"', b'"status":"processing"')
"""As coglet writes them; within a string of JSON the quotation marks would be escaped."""
_log = logging.getLogger(__name__)

Post = Callable[[bytes, float], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    transient: bool


class Delivery:
    """Sends what is offered, one webhook at a time; holds the first, the newest and the last."""

    def __init__(
        self,
        url: str,
        post: Post,
        failed: Callable[[Delivery], None],
        ended: Callable[[Delivery], None],
        *,
        tells_end: bool,
    ) -> None:
        """Calls `failed` whenever the end was not taken and is tried again, `ended` once.

        Without `tells_end`, the last event says only that no other follows.
        """
        self._shown = redact_address(url)[:200]
        self._post = post
        self._failed = failed
        self._ended = ended
        self._tells_end = tells_end
        self._first = self._newest = self._last = self._in_flight = b""
        self._length = 0
        self._begun = self._warned = False
        self.over = False
        """Whether the prediction has ended."""
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _INTERVAL_S
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._on_done)

    @property
    def pending(self) -> bool:
        """Whether something has not been sent that is to be."""
        return bool(self.held_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of what waits, or is on its way."""
        return sum(map(len, (self._first, self._newest, self._last, self._in_flight)))

    def offer(self, event: bytes) -> None:
        """Take an event, unless a newer one was taken.

        Logs and output only grow, and a metric is recorded once, so that the longer one is newer.
        """
        if self.over:
            return
        if not any(mark in event for mark in _RUNNING):
            self.over = True
            if self._tells_end:
                self._last, self._newest = event, b""
        elif not (self._begun or self._first) and _OUTPUT not in event:
            self._first = event
        elif len(event) > self._length:
            self._newest = event
        self._length = max(self._length, len(event))
        self._changed.set()

    def drop_newest(self) -> int:
        """Drop what waits between the first event and the last, which tells it too; its bytes."""
        size, self._newest = len(self._newest), b""
        if size:
            self._warn("too much is held for all webhooks; an event is left out")
            self._changed.set()
        return size

    def give_up(self, reason: str) -> None:
        """Send nothing more."""
        if self._last:
            _log.error("webhook %r: the end is not delivered: %s", self._shown, reason)
        self._first = self._newest = self._last = b""
        self._task.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._ended(self)
        if not task.cancelled() and (error := task.exception()):
            _log.error("webhook %r: the server failed", self._shown, exc_info=error)

    async def _run(self) -> None:
        while event := await self._next():
            self._begun, self._in_flight = True, event
            if failure := await self._try(event, _TIMEOUT_S):
                self._warn(failure.reason)
            event = self._in_flight = b""
            self._due = self._loop.time() + _INTERVAL_S
        for retry in range(_RETRIES + 1):
            if not self._last or (failure := await self._try(self._last, _LAST_TIMEOUT_S)) is None:
                break
            if not failure.transient or retry == _RETRIES:
                self.give_up(failure.reason)
                break
            _log.warning("webhook %r: %s; trying again", self._shown, failure.reason)
            self._failed(self)
            await asyncio.sleep(_BACKOFF_S * 2 ** min(retry + 1, 10))
        self._last = b""

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("webhook %r: %s", self._shown, reason)

    async def _next(self) -> bytes:
        """The next event before the last one, once it is due; empty if there is none."""
        while True:
            self._changed.clear()
            rest = self._due - self._loop.time() if self._newest else _FORGOTTEN_S
            if self._first:
                event, self._first = self._first, b""
                return event
            if rest <= 0:
                event, self._newest = self._newest, b""
                return event
            if self.over and not self._newest:
                return b""
            try:
                await asyncio.wait_for(self._changed.wait(), rest)
            except TimeoutError:
                if not self._newest:  # its Cog has died
                    return b""

    async def _try(self, event: bytes, seconds: float) -> _Failure | None:
        try:
            status = await self._post(event, seconds)
        except InvalidArgument as error:
            return _Failure(str(error), transient=False)
        except OSError as error:
            return _Failure(str(error), transient=True)
        if 200 <= status < 300:
            return None
        return _Failure(f"HTTP {status}", status in _RETRIED)
