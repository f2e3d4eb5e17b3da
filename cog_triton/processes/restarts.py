"""Restarts: how often in a row, and after which pause, a process that failed is started again."""

from __future__ import annotations

import math

STABLE_S = 5.0
"""Seconds of service after which a failure is no longer one in a row."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0


class Restarts:
    """Failures in a row of one process: the first restart comes at once, the next ones later."""

    def __init__(self, most: float = math.inf) -> None:
        """`most` is TRITON_MAX_RESTARTS."""
        self.failures = 0
        self._most = most

    def failed(self, *, stable: bool, counts: bool = True) -> None:
        """Count a failure: the first one if it was `stable` before; one that `counts` adds."""
        self.failures = 1 if stable else max(1, self.failures + counts)

    @property
    def given_up(self) -> bool:
        """Whether there were too many."""
        return self.failures > self._most

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        late = self.failures - 2
        return min(FIRST_PAUSE_S * 2.0 ** min(late, 9), LAST_PAUSE_S) if late >= 0 else 0.0

    def sentence(self, reason: str) -> str:
        """Why it was given up."""
        count = self.failures - 1
        return f"given up after {count} restarts in a row (TRITON_MAX_RESTARTS): {reason}"
