"""Public sockets: the parent binds them, and passes them to the server alone, by number."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from cog_triton.system.ports import bind

BACKLOG = 4096


@contextmanager
def bound(ports: Mapping[str, tuple[str, int]]) -> Iterator[dict[str, socket.socket]]:
    """Listening sockets by the names of their settings; raises E1005 if one cannot be bound."""
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(bind(name, host, port, BACKLOG))
            for name, (host, port) in ports.items()
        }


def as_arguments(sockets: Mapping[str, socket.socket]) -> list[str]:
    """The server's arguments for sockets that it inherits, or that are its own."""
    words = [f"{name}={one.fileno()}" for name, one in sockets.items()]
    return [each for word in words for each in ("--listen", word)]


def received(given: Sequence[str]) -> dict[str, socket.socket]:
    """The sockets of NAME=FD words; no process that this one starts inherits them."""
    sockets = {}
    for name, _, descriptor in (word.partition("=") for word in given):
        os.set_inheritable(int(descriptor), False)
        sockets[name] = socket.socket(fileno=int(descriptor))
    return sockets
