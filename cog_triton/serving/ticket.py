"""Ticket: one request in admission control, as the queue and the resumption order know it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from cog_triton.errors import CogTritonError
from cog_triton.serving.tenants import Tenant

MAX_DEATHS = 3
"""Deaths that may be blamed on a request, without a token in between."""
AGING_S = 10.0
"""Seconds of waiting that a step of priority is worth among requests of a tenant."""


@dataclass(eq=False)
class Ticket:
    """One request, over all of its submissions; it may be cancelled or failed at any time.

    `made` counts its output tokens so far, `number` is of its arrival.
    """

    tenant: Tenant | None = None
    priority: int = 0
    prompt_tokens: int = 0
    made: Callable[[], int] = int
    number: int = 0
    arrived: float = 0.0
    queue_time: float | None = None
    """Seconds from arrival to admission; None until it is admitted."""
    turn: bool = False
    """Whether it may be sent to the engine, for the first time or again."""
    prefilled: bool = False
    """Whether the engine has made a token of it."""
    epoch: int = 0
    """Deaths and stops before it was sent last."""
    exposed: bool = False
    """Whether it was sent, and has no token since."""
    suspect: bool = False
    """Whether it was a suspect of a death since its last token."""
    blamed: int = 0
    """Deaths of which it was the only suspect since then, of the last one alone in the engine."""
    suspected: int = 0
    """Deaths of which it was a suspect since then, alone or among others."""
    replica: int = 0
    """The engine that it was sent to last, of several."""
    cancelled: bool = False
    """Whether its client has cancelled it or disconnected."""
    error: CogTritonError | None = None
    """The error that it was failed with, if any."""
    on_turn: Callable[[], None] = lambda: None
    _stop: Callable[[], None] = lambda: None

    @property
    def flow_name(self) -> str:
        """The tenant's name; blank without tenants."""
        return self.tenant.name if self.tenant is not None else ""

    @property
    def rank(self) -> tuple[float, int]:
        """Place among the requests of its tenant: later ones pass by at most some seconds."""
        return self.arrived + AGING_S * self.priority, self.number

    @property
    def served(self) -> int:
        """Tokens that it has had of the engine."""
        return self.prompt_tokens + self.made()

    @property
    def on_trial(self) -> bool:
        """Whether one more death condemns it."""
        return self.blamed == MAX_DEATHS - 1

    @property
    def ended(self) -> bool:
        """Whether `cancel` or `fail` was called."""
        return self.cancelled or self.error is not None

    def begin(self) -> None:
        self.turn = True
        self.on_turn()

    def cancel(self) -> None:
        """End the request on behalf of its client."""
        self.cancelled = True
        self._stop()

    def fail(self, error: CogTritonError) -> None:
        """End the request with the error that its client gets; the first error wins."""
        self.error = self.error or error
        self._stop()

    def raise_error(self) -> None:
        """Raise the error given to `fail`, if any."""
        if self.error is not None:
            raise copy.copy(self.error)  # one error ends many requests, each with a traceback

    def on_end(self, stop: Callable[[], None]) -> None:
        """Set the callback that `cancel` and `fail` call; called at once if it has ended already.

        It may be called twice.
        """
        self._stop = stop
        if self.ended:
            stop()
