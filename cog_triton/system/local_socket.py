"""Unix sockets in Linux's abstract namespace, between processes of one user.

They leave no file, have no path that is too long, and end with their process. Both ends check
that the other is our own user: messages are orders.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from functools import cache
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 8
_NS_GET_USERNS = 0xB701
_ALL_USERS = 2**32 - 1


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


def connect(name: str) -> socket.socket:
    """Connect to `listen`'s socket; raises OSError while nobody listens."""
    own = socket.socket(socket.AF_UNIX)
    try:
        own.connect(address(name))
        if not is_same_user(own):
            raise PermissionError(f"{name}: another user listens there")
    except OSError:
        own.close()
        raise
    return own


def is_same_user(own: socket.socket) -> bool:
    """Whether our own user is certainly at the other end."""
    user = os.getuid()
    return _peer(own)[1] == user and (user != overflow_uid() or _sees_all_users())


@cache
def overflow_uid() -> int:
    """What a user namespace shows as the uid of every user that it does not map; `nobody`'s."""
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


@cache
def _sees_all_users() -> bool:
    """Whether each uid of our user namespace is one user's, of those who can reach our sockets.

    They can from our network namespace; a user namespace that has made its own maps all in there.
    """
    lengths = Path("/proc/self/uid_map").read_text().split()[2::3]
    if sum(map(int, lengths)) == _ALL_USERS:
        return True
    try:
        with Path("/proc/self/ns/net").open() as network:
            owner = fcntl.ioctl(network, _NS_GET_USERNS)
    except OSError:  # another user namespace that we may not see has made it
        return False
    try:
        return os.path.samestat(os.fstat(owner), Path("/proc/self/ns/user").stat())
    finally:
        os.close(owner)


def _peer(own: socket.socket) -> tuple[int, ...]:
    raw = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)
