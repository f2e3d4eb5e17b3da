"""Unix sockets in Linux's abstract namespace, between processes of one user.

They leave no file, have no path that is too long, and end with their process. Both ends check
that the other is our own user: messages are unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 8


def address(name: str) -> str:
    """Address of the socket `name`."""
    return f"\0{name}"


def listen(name: str) -> socket.socket:
    """Listen on the socket `name`, without blocking; raises OSError if another process does."""
    own = socket.socket(socket.AF_UNIX)
    try:
        own.bind(address(name))
        own.listen(_BACKLOG)
        own.setblocking(False)
    except OSError:
        own.close()
        raise
    return own


def accept(listener: socket.socket) -> Connection | None:
    """Accept a peer; None if it is gone already, or not of our own user."""
    try:
        accepted, _ = listener.accept()
    except OSError:
        return None
    accepted.setblocking(True)
    if not is_same_user(accepted):
        accepted.close()
        return None
    return Connection(accepted.detach())


def connect(name: str) -> Connection:
    """Connect to `listen`'s socket; raises OSError while nobody listens."""
    own = socket.socket(socket.AF_UNIX)
    try:
        own.connect(address(name))
        if not is_same_user(own):
            raise PermissionError(f"{name}: another user listens there")
    except OSError:
        own.close()
        raise
    return Connection(own.detach())


def is_same_user(own: socket.socket) -> bool:
    """Whether our own user is at the other end."""
    return bool(_peer(own)[1] == os.getuid())


def peer_pid(own: Connection) -> int:
    """Process id of who listens at the other end."""
    with socket.socket(fileno=os.dup(own.fileno())) as duplicate:
        return int(_peer(duplicate)[0])


def _peer(own: socket.socket) -> tuple[int, ...]:
    raw = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)
