"""Read coalescing: under load, pieces of many streams are read together."""

from __future__ import annotations

import asyncio
import time

_TURN_S = 0.001
_BUSY_PER_S = 2000
_SAMPLE = 64
_HURRY_S = 0.003


class ReadCoalescing:
    """Lets the event loop pass pieces on once a millisecond, while they are many.

    A wake-up of the process costs as much as passing a piece on. While 2000 pieces a second or more
    come, those of a millisecond are read at one wake-up, half a millisecond later on average. Where
    the machine is too busy for more turns than that anyway, no pause is made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._count = 0
        self._since = 0.0
        self._busy = False
        self._pausing = False
        self._last_turn = 0.0
        self._hurry_until = 0.0

    def hurry(self) -> None:
        """Make no pauses for 3 ms: a request is on its way."""
        self._hurry_until = time.monotonic() + _HURRY_S

    def count(self) -> None:
        """Count a piece of a stream that is passed on."""
        self._count += 1
        if self._count == _SAMPLE:
            now = time.monotonic()
            self._busy = _BUSY_PER_S * (now - self._since) <= _SAMPLE
            self._count, self._since = 0, now
        if self._busy and not self._pausing:
            self._pausing = True
            self._loop.call_soon(self._pause)

    def _pause(self) -> None:
        self._pausing = False
        now = time.monotonic()
        rest = self._last_turn + _TURN_S - now
        if rest > 0 and now >= self._hurry_until:
            time.sleep(rest)
            now = time.monotonic()
        self._last_turn = now
