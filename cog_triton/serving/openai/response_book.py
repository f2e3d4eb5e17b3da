"""Protocol of where responses are kept: a file of this machine, or a server that several share.

What is written comes in batches, each applied whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cog_triton import errors
from cog_triton.errors import CogTritonError

Object = dict[str, Any]
RUNNING = "in_progress"
END = b"\n\n"
"""What ends an event."""
GONE = "there is none, or no longer"
"""End of the error of a response that is not kept."""
MOST_PARTS = 64
"""Parts of a stream, as they were written, that are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A response that is new: `created` is its time, `input` and `body` are JSON."""

    name: str
    tenant: str
    status: str
    created: float
    streamed: bool
    previous: str | None
    input: str
    body: str

    @property
    def size(self) -> int:
        """Characters that count."""
        return len(self.body) + len(self.input)


class Kept(NamedTuple):
    """A response as it is kept; `owner` is the worker that makes it, or has."""

    status: str
    owner: str
    streamed: int
    previous: str | None
    input: str
    body: str

    def told(self) -> Object:
        """The response object."""
        found: Object = json.loads(self.body)
        return found


class Events(NamedTuple):
    """Events of a stream, joined, and their number; `left` says whether more are there already.

    `status` is that of the response, None once it is gone.
    """

    data: bytes
    number: int
    left: bool
    status: str | None


class Changes(Protocol):
    """A batch of changes."""

    def insert(self, entry: Entry) -> None:
        """Keep a new response, of this worker."""

    def append(
        self, name: str, first: int, count: int, data: bytes, lost: Callable[[], None]
    ) -> None:
        """Keep events of a response, from number `first` on; `lost` is called if it has ended."""

    def end(self, name: str, changes: Object) -> None:
        """Change the object of a response that is being made, its status above all."""

    def delete(self, name: str) -> None:
        """Remove a response, and its events."""

    def sweep(self) -> None:
        """Remove what is too old; then, of the tenant that has most, the oldest, down to the size.

        What is being made stays.
        """


class ResponseBook(Protocol):
    """Responses of several workers; reading is thread-safe, and one thread at a time writes."""

    owner: str
    """Of this worker."""

    def read(self, name: str, tenant: str) -> Kept | None:
        """A response of a tenant, if it is kept. Blocks."""

    def owner_of(self, name: str) -> tuple[str, str] | None:
        """Status and owner of a response, if it is kept. Blocks."""

    def events(self, name: str, first: int) -> Events:
        """Events of a response from number `first` on. Blocks."""

    def lives(self, owner: str) -> bool:
        """Whether a worker lives. Blocks."""

    def writing(self) -> AbstractContextManager[Changes]:
        """A batch, applied as the body ends; raises E2100 or E2302 if it was not. Blocks."""

    def close(self) -> None:
        """End this worker's part in it."""


def events_from(first: int, parts: list[tuple[int, int, bytes]], status: str | None) -> Events:
    """Events from number `first` on, of `parts`: number of the first, how many, and they."""
    data, number = b"".join(part[2] for part in parts), sum(part[1] for part in parts)
    if parts and (known := first - parts[0][0]) > 0:
        data, number = data.split(END, known)[known], number - known
    return Events(data, number, len(parts) == MOST_PARTS, status)


def error_of(error: CogTritonError) -> Object:
    """The `error` of a failed response: OpenAI's code, and ours in the message."""
    return {"code": "server_error", "message": str(error)}


def failure() -> Object:
    """What changes in the object of a response whose worker lives no more."""
    error = errors.TritonUnavailable("the server ended while it made this response")
    return {"status": "failed", "error": error_of(error)}
