"""Cog's HTTP server, with the socket that it listens on tuned. Delete when coglet does both.

    python -m cog_triton.serving.coglet.http_server [arguments of cog.server.http]

coglet 0.23.1 leaves Nagle's algorithm on: on a connection that was used before, the first token
waits until the client's system acknowledges the head, which Linux puts off by 40 ms. And it lets
128 connections wait to be accepted: of a burst of more, those that find no place are tried again by
their clients' systems after 1 s, and then after 3. It has no options for that, and makes its socket
in Rust; but on Linux what a socket accepts inherits TCP_NODELAY, and listen(2) may be called again,
so it is enough to do both on the one that listens, as soon as there is one.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading
import time
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_POLL_S = 0.001
_TIMEOUT_S = 60.0
_BACKLOG = 4096
"""Connections; Linux takes its net.core.somaxconn if that is less."""


def tune_listening_socket(port: int, within: float = _TIMEOUT_S) -> None:
    """Wait for this process to listen on TCP `port`; then turn Nagle's algorithm off there, and
    let more connections wait.

    Says so on stderr if that does not come to be `within` so many seconds.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if any(_tune_if_listening(int(entry.name), port) for entry in _DESCRIPTORS.iterdir()):
            return
        time.sleep(_POLL_S)
    print(
        f"cog-triton: Cog did not listen on PORT={port} within {within:g} s: Nagle's algorithm is"
        " left on, and first tokens may come 40 ms late, those of bursts 1 s",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    """Run ``python -m cog.server.http`` with this process's arguments, to its end."""
    port = int(os.getenv("PORT", "5000"))  # as Cog reads it
    threading.Thread(target=tune_listening_socket, args=(port,), name="tune", daemon=True).start()
    runpy.run_module("cog.server.http", run_name="__main__", alter_sys=True)


def _tune_if_listening(descriptor: int, port: int) -> bool:
    """Whether `descriptor` listens on `port`; it may be anything, and may be closed by now."""
    try:
        found = socket.socket(fileno=descriptor)  # no copy: the peer of a copy sees no end
    except OSError:
        return False
    try:
        if not _is_listening(found, port):
            return False
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.listen(_BACKLOG)
    except OSError:
        return False
    finally:
        found.detach()
    return True


def _is_listening(found: socket.socket, port: int) -> bool:
    return (
        found.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
        and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        and found.getsockname()[1] == port
    )


if __name__ == "__main__":
    main()
