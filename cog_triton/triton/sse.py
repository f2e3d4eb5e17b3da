"""Server-sent events, read chunk by chunk: one network read may hold many events or half one."""

from __future__ import annotations


class EventBuffer:
    """Cuts a byte stream of ``data: ...`` events into their payloads."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the events that `chunk` completes."""
        *complete, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        return [payload for event in complete if (payload := _payload(event))]

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return self._rest


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].strip() for line in lines)
