"""Retry policy for transient errors: exponential backoff, bounded by failures without progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import BuildCancelled, CogTritonError, ModelUnavailable

_MAX_RETRY_AFTER_S = 120.0
_TRANSIENT_STATUSES = (408, 425, 429)
Result = TypeVar("Result")


def is_transient(status: int) -> bool:
    """Whether an HTTP status is of an error that a retry may cure."""
    return status in _TRANSIENT_STATUSES or status >= 500


class TransientError(Exception):
    """An error that a retry may cure; `retry_after_s` is the pause that the server asks for."""

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RetryPolicy:
    """Limits and delays of retries; delays double from `initial_s` to `max_s`, without jitter.

    Args:
        max_failures: give up after so many in a row without a byte between them.
        max_failures_at_start: the same until the first byte: who waits for a server wants to
            know soon that its address is wrong.
    """

    max_failures: int = 8
    max_failures_at_start: int = 5
    initial_s: float = 0.5
    max_s: float = 30.0


@dataclass
class Backoff:
    """Failures in a row of one transfer, with a wait after each.

    Args:
        name: what is fetched, redacted.
        received: bytes so far; more than at the last failure reset the count.
        stop: ends a wait.
        tag: what is done, as the lines begin.
        failure: the error to give up with.
    """

    policy: RetryPolicy
    name: str
    echo: Echo
    received: Callable[[], int]
    stop: threading.Event
    tag: str = "download"
    failure: type[CogTritonError] = ModelUnavailable

    def __post_init__(self) -> None:
        self._failures, self._received_before = 0, self.received()

    def retried(self, action: Callable[[], Result]) -> Result:
        """Result of `action`, done again after transient errors; raises as `wait_after`."""
        while True:
            self.require_running()
            try:
                return action()
            except TransientError as error:
                self.wait_after(error)

    def wait_after(self, error: TransientError) -> None:
        """Count a failure, and wait until the next attempt is due.

        Raises:
            ModelUnavailable, or `failure`: too many without progress; names the last one.
            BuildCancelled: `stop` was set.
        """
        received, policy = self.received(), self.policy
        if received > self._received_before:
            self._failures, self._received_before = 0, received
        self._failures += 1
        if self._failures >= policy.max_failures or (
            received == 0 and self._failures >= policy.max_failures_at_start
        ):
            raise self.failure(
                f"{self.name}: {error} ({self._failures} attempts without progress)"
            ) from None
        delay = min(policy.initial_s * 2.0 ** (self._failures - 1), policy.max_s)
        delay = max(delay, min(error.retry_after_s or 0.0, _MAX_RETRY_AFTER_S))
        self.echo(f"[{self.tag}] {self.name}: {error}; again in {delay:g} s")
        self.stop.wait(delay)
        self.require_running()

    def require_running(self) -> None:
        """Raise BuildCancelled where `stop` is set."""
        if self.stop.is_set():
            raise BuildCancelled(f"{self.name}: the {self.tag} was stopped")
