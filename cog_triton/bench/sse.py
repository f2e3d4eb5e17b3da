"""Server-sent events for counting: cut out of reads as they come, not decoded."""

from __future__ import annotations

import re

_NAME = re.compile(rb"(?:^|\n)event: ?([^\n]*)")


class Splitter:
    """Cuts a byte stream into whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, without the blank line between."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return events


def name(event: bytes) -> bytes:
    """The event's name, empty if it has none."""
    found = _NAME.search(event)
    return found[1] if found else b""


def data(event: bytes) -> bytes:
    """The event's data, its lines joined."""
    lines = (line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line.removeprefix(b" ") for line in lines)
