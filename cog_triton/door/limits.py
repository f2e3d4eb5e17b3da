"""Limits of the front door, as one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from cog_triton.settings.addresses import AccessSettings

_OWN_DESCRIPTORS = 64
_BODIES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds, connections over all ports together.

    `arrival_s` bounds the time from a request's first byte to its last, `idle_s` the time between
    the requests of a connection, before the first, and without reading an answer. `json_depth`
    counts nested arrays and objects, `json_values` all values of a body.
    """

    body_bytes: int = 8 << 20
    header_bytes: int = 32 << 10
    json_depth: int = 64
    json_values: int = 32768
    connections: int = 4096
    arrival_s: float = 30.0
    idle_s: float = 75.0

    @property
    def all_bodies_bytes(self) -> int:
        """Bodies of all requests that are arriving or being answered, together."""
        return _BODIES_AT_ONCE * self.body_bytes

    @classmethod
    def of(cls, settings: AccessSettings, descriptors: int) -> Self:
        """The limits of `settings` for a process that may have so many open files.

        A connection takes two of them, its own and one to the server behind.
        """
        return cls(
            body_bytes=settings.max_request_bytes,
            header_bytes=settings.max_header_bytes,
            json_depth=settings.max_json_depth,
            json_values=settings.max_json_values,
            connections=min(
                settings.max_connections, max(1, (descriptors - _OWN_DESCRIPTORS) // 2)
            ),
            arrival_s=settings.request_timeout,
            idle_s=settings.idle_timeout,
        )
