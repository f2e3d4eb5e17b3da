"""Withdrawal of a tritonserver from its gRPC port, which another one listens on, too.

Both have SO_REUSEPORT, so the kernel spreads new connections over them. Triton cannot stop to
listen without stopping, so its listening sockets are shut down from outside: what is connected
goes on, and all new connections are the other's (measured with Triton 24.10).
"""

from __future__ import annotations

import socket

from cog_triton.system.foreign_sockets import sockets_of
from cog_triton.triton.liveness import tritonserver_pids

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def withdraw(root: int, port: int) -> int:
    """End listening on `port` in every tritonserver below the process `root`; returns how many did.

    Raises OSError if the system does not permit it.
    """
    return sum(_shut_down(pid, port) for pid in tritonserver_pids(root))


def _shut_down(pid: int, port: int) -> bool:
    found = False
    for own in sockets_of(pid):
        if own.family in _INTERNET and _listens(own) and own.getsockname()[1] == port:
            own.shutdown(socket.SHUT_RD)
            found = True
    return found


def _listens(own: socket.socket) -> bool:
    return own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
