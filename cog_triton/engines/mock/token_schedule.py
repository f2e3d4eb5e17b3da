"""Token schedule of one mock stream: due times at a fixed rate, with optional jitter."""

from __future__ import annotations

import random

_STEP = 2654435761  # neighbouring seeds are far apart in the table
_SIZE = 4096
_random = random.Random(0)
_OFFSETS = [_random.random() - 0.5 for _ in range(_SIZE)]


class TokenSchedule:
    """Due times: token k, from 1 on, at ``begin + k / tps`` seconds, however late others were.

    With a `jitter` up to 1 it is due up to half of that part of 1 / `tps` earlier or later, the
    same for the same `seed`; never before the one ahead of it. A `tps` of 0 has all due at once.
    `begin` is when prefill ends.
    """

    __slots__ = ("_interval", "_jitter", "_seed", "begin")

    def __init__(self, begin: float, tps: float, jitter: float = 0.0, seed: int = 0) -> None:
        self.begin = begin
        self._interval = 1 / tps if tps else 0.0
        self._jitter = jitter
        self._seed = seed * _STEP

    def due(self, token: int) -> float:
        """Due time of a token, in seconds of the scheduler's clock."""
        if self._jitter:
            offset = _OFFSETS[(self._seed + token) % _SIZE]
            return self.begin + (token + self._jitter * offset) * self._interval
        return self.begin + token * self._interval
