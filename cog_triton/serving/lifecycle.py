"""Lifecycle of the supervised Triton: what follows each failure; no clock, process or request."""

from __future__ import annotations

import enum
import math

from cog_triton.errors import CogTritonError, TritonStartFailed, TritonUnavailable

_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0


class SupervisorState(enum.StrEnum):
    """Lifecycle of the supervised Triton."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class Lifecycle:
    """State machine of a Triton that is restarted, with backoff, `max_restarts` times in a row."""

    def __init__(self, max_restarts: int) -> None:
        self.state = SupervisorState.STARTING
        self.error: CogTritonError | None = None
        """Why Triton is not ready any more; None until the first failure and while it is ready."""
        self.restarts_disabled = False
        self._max_restarts = max_restarts
        self._failures = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        failures = self._failures
        return min(_BACKOFF_S * 2 ** (failures - 2), _MAX_BACKOFF_S) if failures > 1 else 0.0

    @property
    def refusal(self) -> CogTritonError:
        """The error of requests that do not wait for what comes next."""
        assert self.error is not None
        if self.state is SupervisorState.FAILED:
            return TritonUnavailable(f"{first_line(self.error.detail)}; the server stops")
        return self.error

    def ready(self) -> None:
        """It was started."""
        self.error = None
        self.state = SupervisorState.READY

    def restart_planned(self) -> None:
        """It is started again, which is no failure."""
        self.state = SupervisorState.RESTARTING

    def failed(self, reason: str, start_s: float, *, stable: bool, blamed: bool) -> None:
        """It failed, after a start that took `start_s`: `stable` if it was ready for long enough.

        A death for which one request is `blamed` does not count beside others in a row.
        """
        self._failures = 1 if stable else max(1, self._failures + (not blamed))
        self._choose(reason, start_s)

    def start_failed(self, reason: str, start_s: float) -> None:
        """It could not be started again."""
        self._failures += 1
        self._choose(reason, start_s)

    def give_up(self, why: str) -> None:
        """It is not started again, and the server stops."""
        self.state, self.error = SupervisorState.FAILED, TritonStartFailed(why)

    def _choose(self, reason: str, start_s: float) -> None:
        if self.restarts_disabled:
            self.state = SupervisorState.STOPPED
            self.error = TritonUnavailable(f"{first_line(reason)}; the server is stopping")
        elif self._failures > self._max_restarts:
            count = self._failures - 1
            self.give_up(
                f"given up after {count} restarts in a row (TRITON_MAX_RESTARTS): {reason}"
            )
        else:
            self.state = SupervisorState.RESTARTING
            self.error = TritonUnavailable(
                f"{first_line(reason)}; Triton is being restarted, try again in"
                f" {math.ceil(self.pause + start_s)} s"
            )


def first_line(text: str) -> str:
    """The part of a reason for clients; the other lines are from Triton's log."""
    return text.partition("\n")[0]
