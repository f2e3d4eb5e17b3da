"""Server-sent events (SSE): a byte stream cut into events; a read may hold many or half of one."""

from __future__ import annotations

import re

_NAME = re.compile(rb"(?:^|\n)event: ?([^\n]*)")


class EventSplitter:
    """Cuts a byte stream, chunk by chunk, into whole events; lines may end in CRLF."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, each without the blank line that ends it."""
        data = self._rest + chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return events

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return self._rest


def event_name(event: bytes) -> bytes:
    """The `event` field, empty if there is none."""
    found = _NAME.search(event)
    return found[1] if found else b""


def event_data(event: bytes) -> bytes:
    """The `data` field, lines joined; empty if there is none, as for a comment."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line.removeprefix(b" ") for line in lines)
