"""Token transport: requests to the engine's model, and the tokens of each as they are made.

`step_stream` brings the tokens of all requests in one response a step, `request_streams` in a
response for each request's, from backends whose model is not ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, StepItem
from cog_triton.errors import CogTritonError

Put = Callable[[StepItem], None]
"""Takes an item of a request; must not block."""


class Submission(Protocol):
    """A request that was handed to the engine `replica`, 0 if there is only one."""

    replica: int

    def cancel(self) -> None:
        """Stop the engine's work on it; items may still arrive."""


class TokenTransport(Protocol):
    """Way to the engine and back."""

    @property
    def last_token_at(self) -> float:
        """When any request last got something of the engine, by time.monotonic()."""

    @property
    def others_at(self) -> float:
        """When the engine last had requests that are not ours; inf while it has."""

    def has_ended(self, replica: int | None) -> bool:
        """Whether all has come that a dead engine has sent, of several that `replica`."""

    def note_active(self, requests: int | None) -> None:
        """An engine inside tritonserver has so many requests; None if Triton does not say."""

    async def open(self, generations: Mapping[int, int]) -> None:
        """Connect, after Triton has started; raises E2105 if that fails.

        It is open once an engine of at least one of these `generations` is there, by replica.
        """

    async def disconnect(self) -> None:
        """Disconnect before Triton is stopped, which would wait for open streams.

        Requests that run fail.
        """

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> Submission:
        """Send a request; `engine_inputs` are inputs that only this engine has.

        `put` gets items up to one that has an `end`; a gap in their offsets shows lost tokens. A
        request that gets nothing for the timeout ends with E2101. Raises E2105 while there is no
        connection.
        """


def failure(handle: int, error: CogTritonError | str) -> StepItem:
    """The item that ends a request with an error."""
    return StepItem(handle, 0, 0, [], [], ERROR, str(error))
