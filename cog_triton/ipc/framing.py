"""Frames between processes: each payload follows its length, four bytes, big-endian.

One framing for control messages and for tokens, read in blocks or as bytes arrive; `streams` has it
in asyncio.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from contextlib import suppress

MAX_FRAME = 1 << 30
"""Bytes of the largest payload that is read, unless the reader bounds it otherwise."""
CONTROL_LIMIT = 16 << 20
"""Bytes of the largest payload of a control message."""
LENGTH = struct.Struct("!I")
"""What is before each payload."""
_CHUNK = 1 << 18


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


class FrameSocket:
    """A connected socket that sends and receives frames, and blocks; one reader, one writer."""

    def __init__(self, own: socket.socket, limit: int = MAX_FRAME) -> None:
        self.socket = own
        self._decoder = FrameDecoder(limit)
        self._arrived: deque[bytes] = deque()
        self._poller = select.poll()
        self._poller.register(own, select.POLLIN)

    def fileno(self) -> int:
        """Descriptor, for select; frames that `receive` has read already do not wake it up."""
        return self.socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send a payload; raises OSError at a hang-up."""
        self.socket.sendall(frame(payload))

    def receive(self) -> bytes:
        """The next payload; raises EOFError or OSError when the peer is gone."""
        self._wait()
        return self._arrived.popleft()

    def receive_all(self) -> list[bytes]:
        """All payloads that have arrived, at least one; raises as `receive`."""
        self._wait()
        payloads = list(self._arrived)
        self._arrived.clear()
        return payloads

    def _wait(self) -> None:
        while not self._arrived:
            data = self.socket.recv(_CHUNK)
            if not data:
                raise EOFError
            self._arrived.extend(self._decoder.feed(data))

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether `receive` has something to read within `timeout` seconds, be it a hang-up."""
        return bool(self._arrived or self._poller.poll(timeout * 1000))

    def hang_up(self) -> None:
        """End it for both sides; another thread's `receive` ends with EOFError."""
        with suppress(OSError):  # the peer was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give the descriptor back."""
        self.hang_up()
        self.socket.close()


def check(length: int, limit: int) -> None:
    """Raise FrameError for a length above the limit."""
    if length > limit:
        raise FrameError(f"a frame of {length} bytes; {limit} at most")
