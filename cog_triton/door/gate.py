"""Interface of the gates: what decides on the requests of one port."""

from __future__ import annotations

from typing import Protocol

from cog_triton import errors
from cog_triton.door.message import Answer, Forward, Request


class Gate(Protocol):
    """What may pass on one port, and what refusals look like there."""

    async def decide(self, request: Request) -> Forward | Answer:
        """Where the request goes, or the door's own answer to it.

        Raises:
            Refused: it does not pass.
        """
        ...

    def refusal(self, status: int, error: errors.CogTritonError) -> Answer:
        """An error in the shape of the API behind the port."""
        ...
