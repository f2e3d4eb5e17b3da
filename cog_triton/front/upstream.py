"""What is behind the gates: Cog, Triton and the server's own predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cog_triton.errors import CogTritonError
from cog_triton.front.cog_state import CogState
from cog_triton.serving.tenants import Tenant


class Upstream:
    """Cog and Triton on `ports` of 127.0.0.1, by the names of their settings.

    A prediction of the id `check_id` is the front's own; see `CogState`.
    """

    def __init__(
        self, ports: Mapping[str, int], check_id: str | None = None, start_timeout: float = 0.0
    ) -> None:
        self.ports = ports
        self.state = CogState(ports.get("PORT", 0), check_id, start_timeout)
        self.stopping = False
        """Whether no new request is taken any more."""
        self.ask_to_stop: Callable[[], None] = lambda: None
        """Begins the graceful stop."""
        self.cancel: Callable[[str], None] = lambda _: None
        """Cancels a prediction, of which nothing may be known yet."""
        self.health: Callable[[], dict[str, Any]] = dict
        """The server's state in the form of Cog's health."""
        self.without_cog: CogTritonError | None = None
        """Why no Cog was started."""
        self.predictions: dict[str, Running] = {}
        """Predictions that clients wait for, by their ids."""


@dataclass(slots=True)
class Running:
    """A prediction that `clients` wait for, and whose it is."""

    tenant: Tenant | None
    clients: int = 0
