"""Lines of JSON on sockets that block, where two versions of this package may meet."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from json import dumps
from typing import Any

_LEAST_S = 0.02


def send_line(own: socket.socket, message: Mapping[str, Any]) -> None:
    """Send an object; raises OSError at a hang-up."""
    own.sendall(dumps(message).encode() + b"\n")


def receive_line(own: socket.socket, limit: int, seconds: float | None = None) -> bytes:
    """The next line; who does not end it within `seconds` is taken for gone.

    Raises EOFError or OSError, and ValueError where it is longer than `limit` bytes.
    """
    line, began = bytearray(), time.monotonic()
    while not line.endswith(b"\n"):
        if seconds is not None:
            own.settimeout(max(began + seconds - time.monotonic(), _LEAST_S))
        if len(line) >= limit:
            raise ValueError("its message is too long")
        if not (byte := own.recv(1)):
            raise EOFError("it has hung up")
        line += byte
    return bytes(line)
