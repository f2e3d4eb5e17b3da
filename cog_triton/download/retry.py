"""Trouble that may pass, and for how long it is put up with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import ModelUnavailable

_MOST_ASKED_S = 120.0


class Passing(Exception):
    """Trouble that may pass; `after_s` is when the other side wants to be asked again."""

    def __init__(self, text: str, after_s: float | None = None) -> None:
        super().__init__(text)
        self.after_s = after_s


@dataclass(frozen=True)
class Retry:
    """The pauses between attempts: doubling from `first_s` to `most_s`, without chance.

    Args:
        limit: so many failures in a row, not one byte between them, are the end.
        limit_at_first: as long as nothing has come at all, so many are: who waits for a server
            to start wants to know soon that its address is wrong.
    """

    limit: int = 8
    limit_at_first: int = 5
    first_s: float = 0.5
    most_s: float = 30.0

    def pause_s(self, failures: int, asked_s: float | None = None) -> float:
        """How long to wait after `failures`; what the other side asks for counts, to 2 minutes."""
        pause = min(self.first_s * 2.0 ** (failures - 1), self.most_s)
        return pause if asked_s is None else max(pause, min(asked_s, _MOST_ASKED_S))


class Patience:
    """Counts failures in a row, and waits after each.

    Args:
        name: what is fetched, as it may be shown.
        reached: how many bytes have come so far; a failure after more of them is the first again.
        wait: waits so many seconds; may raise to end it.
    """

    def __init__(
        self,
        retry: Retry,
        name: str,
        echo: Echo,
        reached: Callable[[], int],
        wait: Callable[[float], None],
    ) -> None:
        self._retry = retry
        self._name = name
        self._echo = echo
        self._reached = reached
        self._wait = wait
        self._failures = 0
        self._mark = reached()

    def failed(self, trouble: Passing) -> None:
        """Wait until it may be tried again.

        Raises:
            ModelUnavailable: it has failed too often; names what, and the last trouble.
        """
        reached = self._reached()
        if reached > self._mark:
            self._failures, self._mark = 0, reached
        self._failures += 1
        if self._failures >= self._retry.limit or (
            reached == 0 and self._failures >= self._retry.limit_at_first
        ):
            raise ModelUnavailable(
                f"{self._name}: {trouble} ({self._failures} attempts without progress)"
            ) from None
        pause = self._retry.pause_s(self._failures, trouble.after_s)
        self._echo(f"[download] {self._name}: {trouble}; again in {pause:g} s")
        self._wait(pause)
