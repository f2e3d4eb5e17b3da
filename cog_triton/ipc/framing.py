"""Frames between processes: each payload follows its length, four bytes, big-endian.

One framing for control messages and for tokens.
"""

from __future__ import annotations

import struct

MAX_FRAME = 1 << 30
"""Bytes of the largest payload that is read, unless the reader bounds it otherwise."""
CONTROL_LIMIT = 16 << 20
"""Bytes of the largest payload of a control message."""
LENGTH = struct.Struct("!I")
"""What is before each payload."""


class FrameError(ConnectionError):
    """A peer announces a payload larger than the bound: what follows is no frame to be trusted."""


def frame(payload: bytes) -> bytes:
    """The payload with its length before it; raises FrameError above `MAX_FRAME`."""
    check(len(payload), MAX_FRAME)
    return LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Incremental reader: bytes in as they arrive, whole payloads out."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes; raises FrameError for one above the limit."""
        buffer, at, payloads = self._buffer, 0, []
        buffer += data
        while len(buffer) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, at)
            check(length, self._limit)
            start, end = at + LENGTH.size, at + LENGTH.size + length
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[start:end]))
            at = end
        del buffer[:at]
        return payloads


def check(length: int, limit: int) -> None:
    """Raise FrameError for a length above the limit."""
    if length > limit:
        raise FrameError(f"a frame of {length} bytes; {limit} at most")
