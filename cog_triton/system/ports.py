"""TCP ports and listening sockets of servers: bound, reserved, passed on, checked and found.

The parent binds the sockets of a server, and passes the public ones to the server only.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cog_triton.errors import InvalidArgument

# Below the ephemeral range, from which an outgoing connection could take a port first.
_UNRESERVED = range(12000, 32000)
_BLOCK = 200
_LISTEN = 10
BACKLOG = 4096
_BEHIND = ("PORT", "TRITON_HTTP_PORT", "TRITON_METRICS_PORT")

OPENAI_PORT = 8080
"""Where `cog-triton serve` has the OpenAI API, unless told otherwise."""


def require_free(ports: Mapping[str, tuple[str, int]]) -> None:
    """Raise E1005 unless every (address, port) is free and no two are equal; keys are settings."""
    taken: dict[int, str] = {}
    for name, (host, port) in ports.items():
        if port in taken:
            raise InvalidArgument(f"{name}={port}: is {taken[port]} too; must differ")
        taken[port] = name
        bind(name, host, port, 1).close()


def refusal(host: str, port: int) -> str | None:
    """Why `port` cannot be listened on, None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None


def bind(name: str, host: str, port: int, backlog: int) -> socket.socket:
    """Open a listening socket; raises E1005 when the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, the first
    # token waits some 40 ms until the client acknowledges the response head.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(backlog)
    except OSError as error:
        found.close()
        raise InvalidArgument(
            f"{name}={port}: cannot listen on {host}:{port}: {error.strerror or error};"
            f" choose another with {name}=..."
        ) from error
    return found


def reserve() -> socket.socket:
    """A port of 127.0.0.1 that only a server can have that is told its number, until closed.

    The socket is bound and does not listen: the kernel gives its port to no one that asks for any,
    and lets another listen there that sets SO_REUSEADDR, as servers do.
    """
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return found


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


def free_ports(count: int) -> list[int]:
    """`count` distinct TCP ports of 127.0.0.1 that were free at the time of the call.

    A process returns no port twice, and no two processes the same one while both run, so that
    servers started side by side do not collide.
    """
    found: list[int] = []
    while len(found) < count:
        port = next(_numbers)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def listening_sockets() -> Iterator[tuple[int, int]]:
    """Local port and inode of each TCP socket that listens in this network namespace (proc(5)).

    Raises OSError if no file descriptor is left to look with.
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), Path(table).open(encoding="ascii") as lines:
            next(lines)
            for line in lines:
                fields = line.split(maxsplit=10)
                if int(fields[3], 16) != _LISTEN:
                    break  # listening sockets come first
                yield int(fields[1].rpartition(":")[2], 16), int(fields[9])


def _claimed() -> Iterator[int]:
    """Ports of blocks that no other process has: whoever binds a block's first port, until its end.

    Raises OSError when all blocks are taken.
    """
    blocks = _UNRESERVED[::_BLOCK]
    for first in random.sample(blocks, len(blocks)):
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
            continue
        claim.detach()
        yield from range(first + 1, first + _BLOCK)
    raise OSError(errno.EADDRINUSE, "no block of ports is free")


_numbers = _claimed()
