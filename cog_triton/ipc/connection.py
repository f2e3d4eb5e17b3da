"""Connections of own processes, which carry messages and block; `streams` has them in asyncio."""

from __future__ import annotations

import socket
from typing import Any

from cog_triton.ipc.framing import CONTROL_LIMIT, FrameSocket
from cog_triton.ipc.messages import decode, encode


class Connection:
    """A connection that blocks; one thread sends, one receives."""

    def __init__(self, own: socket.socket) -> None:
        self._frames = FrameSocket(own, CONTROL_LIMIT)

    def fileno(self) -> int:
        """Descriptor, for select; see `FrameSocket.fileno`."""
        return self._frames.fileno()

    def send(self, message: Any) -> None:
        """Send a message; raises OSError at a hang-up."""
        self._frames.send(encode(message))

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; raises EOFError or OSError when the peer is gone.

        Among those are TimeoutError, when it is silent for `timeout` seconds, and FrameError for
        what is no message.
        """
        if timeout is not None and not self._frames.poll(timeout):
            raise TimeoutError(f"silent for {timeout:g} s")
        return decode(self._frames.receive())

    def close(self) -> None:
        """Hang up."""
        self._frames.close()
