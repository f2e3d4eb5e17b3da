"""Protocol of where responses are stored: a file of this machine, or Redis for several replicas.

Answers are stored whole. The events of those that are made are in the memory of their server.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

RUNNING = "in_progress"
GONE = "there is none, or no longer"
"""End of the error of a response that is not stored."""


class StoredResponse(NamedTuple):
    """A response: `input` and `body` are JSON, `created` is seconds since the epoch.

    `owner` is the server that makes it, or made it; `elsewhere` says whether it is another one
    that still runs.
    """

    id: str
    tenant: str
    status: str
    created: float
    previous: str | None
    input: str
    body: str
    owner: str = ""
    elsewhere: bool = False


class ResponseStore(Protocol):
    """Responses of all servers that share a store, within its age and size.

    If they are more, the oldest of the tenant that has most are removed. Those that are made
    remain. Each method raises E2302 if the disk or the memory is full, and E2100 for other
    failures.
    """

    async def add(self, response: StoredResponse) -> None:
        """Store a response that this server makes or has made, whatever its `owner`."""

    async def end(self, name: str, status: str, body: str) -> None:
        """Store how a response ended; nothing happens if it is removed meanwhile."""

    async def read(self, name: str, tenant: str) -> StoredResponse | None:
        """A response of this tenant, if there is one."""

    async def delete(self, name: str) -> None:
        """Remove a response."""

    async def cancel(self, response: StoredResponse) -> bool:
        """Ask the server elsewhere that makes it to end it; False if that cannot be asked."""
