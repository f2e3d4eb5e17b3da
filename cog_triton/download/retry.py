"""Retry policy for transient errors: exponential backoff, bounded by failures without progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import CogTritonError, ModelUnavailable

_MAX_RETRY_AFTER_S = 120.0
_TRANSIENT_STATUSES = (408, 425, 429)


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

    def delay_s(self, failures: int, retry_after_s: float | None = None) -> float:
        """Seconds to wait after `failures`; at least the server's Retry-After, up to 2 minutes."""
        delay = min(self.initial_s * 2.0 ** (failures - 1), self.max_s)
        return max(delay, min(retry_after_s or 0.0, _MAX_RETRY_AFTER_S))


class Backoff:
    """Failures in a row of one transfer, with a wait after each.

    Args:
        name: what is fetched, redacted.
        received: bytes so far; more than at the last failure reset the count.
        wait: waits so many seconds; may raise to cancel.
        tag: what is done, as the lines begin.
        failure: the error to give up with.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        name: str,
        echo: Echo,
        received: Callable[[], int],
        wait: Callable[[float], None],
        tag: str = "download",
        failure: type[CogTritonError] = ModelUnavailable,
    ) -> None:
        self._policy = policy
        self._name = name
        self._echo = echo
        self._received = received
        self._wait = wait
        self._tag = tag
        self._failure = failure
        self._failures = 0
        self._received_before = received()

    def wait_after(self, error: TransientError) -> None:
        """Count a failure, and wait until the next attempt is due.

        Raises:
            ModelUnavailable, or `failure`: too many without progress; names the last one.
        """
        received = self._received()
        if received > self._received_before:
            self._failures, self._received_before = 0, received
        self._failures += 1
        if self._failures >= self._policy.max_failures or (
            received == 0 and self._failures >= self._policy.max_failures_at_start
        ):
            raise self._failure(
                f"{self._name}: {error} ({self._failures} attempts without progress)"
            ) from None
        delay = self._policy.delay_s(self._failures, error.retry_after_s)
        self._echo(f"[{self._tag}] {self._name}: {error}; again in {delay:g} s")
        self._wait(delay)
