"""Sockets of a server: the parent binds them, and passes the public ones to the server only."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from cog_triton.system.ports import bind, reserve

BACKLOG = 4096
_BEHIND = ("PORT", "TRITON_HTTP_PORT", "TRITON_METRICS_PORT")


@contextmanager
def bound(ports: Mapping[str, tuple[str, int]]) -> Iterator[dict[str, socket.socket]]:
    """Listening sockets by the names of their settings; raises E1005 if one cannot be bound."""
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(bind(name, host, port, BACKLOG))
            for name, (host, port) in ports.items()
        }


@contextmanager
def private_ports(public: Collection[str]) -> Iterator[dict[str, int]]:
    """Ports of 127.0.0.1 for Cog and Triton behind public ones; nobody else has them meanwhile."""
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(reserve()).getsockname()[1]
            for name in _BEHIND
            if name in public
        }


def received(given: Sequence[str]) -> dict[str, socket.socket]:
    """The sockets of NAME=FD words; no process that this one starts inherits them."""
    sockets = {}
    for name, _, descriptor in (word.partition("=") for word in given):
        os.set_inheritable(int(descriptor), False)
        sockets[name] = socket.socket(fileno=int(descriptor))
    return sockets
