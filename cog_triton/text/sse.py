"""Server-sent events (SSE): a byte stream cut into events; a read may hold many or half of one."""

from __future__ import annotations

import re

_NAME = re.compile(rb"(?:^|\n)event: ?([^\n]*)")


class EventSplitter:
    """Cuts a byte stream, chunk by chunk, into whole events; lines may end in CRLF."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._tail = b""  # two bytes, with which a blank line may begin

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, each without the blank line that ends it."""
        data = self._tail + chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, last = data.split(b"\n\n")
        if events:
            events[0] = b"".join([*self._begun, events[0]])
            self._begun.clear()
        self._begun.append(last[:-2])
        self._tail = last[-2:]
        return events

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return b"".join([*self._begun, self._tail])


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
