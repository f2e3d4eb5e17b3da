"""Workaround: Cog's HTTP server with TCP_NODELAY and a larger backlog on its listening socket.

    python -m cog_triton.serving.coglet.http_server [arguments of cog.server.http]

Delete when coglet sets both. coglet 0.23.1 leaves Nagle's algorithm on: on a reused connection, the
first token waits until the client acknowledges the response head, which Linux delays by 40 ms. And
its backlog is 128 connections: in a larger burst, the clients of those that do not fit retry after
1 s, then 3 s. It has no options for that, and creates its socket in Rust; but on Linux accepted
sockets inherit TCP_NODELAY, and listen(2) may be called again, so it is enough to do both on the
listening socket as soon as it exists.
"""

from __future__ import annotations

import logging
import os
import runpy
import socket
import sys
import threading
import time
from pathlib import Path

from cog_triton.errors import TritonStartFailed
from cog_triton.serving.coglet import server_environment
from cog_triton.serving.coglet.prediction_directory import prediction_directory
from cog_triton.system import log_format

_log = logging.getLogger(__name__)

_DESCRIPTORS = Path("/proc/self/fd")
_POLL_S = 0.001
_TIMEOUT_S = 60.0
_BACKLOG = 4096
"""Connections; Linux takes its net.core.somaxconn if that is less."""


def tune_listening_socket(port: int, within: float = _TIMEOUT_S) -> None:
    """Wait until this process listens on TCP `port`; then set TCP_NODELAY and a larger backlog.

    Logs a warning if it does not listen `within` so many seconds.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if any(_tune_if_listening(int(entry.name), port) for entry in _DESCRIPTORS.iterdir()):
            return
        time.sleep(_POLL_S)
    _log.warning(
        "Cog did not listen on PORT=%d within %g s: Nagle's algorithm is left on, and first tokens"
        " may come 40 ms late, those of bursts 1 s",
        port,
        within,
    )


def main() -> None:
    """Run ``python -m cog.server.http`` with the arguments of this process."""
    log_format.configure_from_environment("json")
    server_environment.limit_slots(os.environ)
    server_environment.limit_threads(os.environ)
    server_environment.limit_colours(os.environ)
    server_environment.require_writable(os.environ)
    port = int(os.getenv("PORT", "5000"))  # as Cog reads it
    builds = os.getenv("COG_TRITON_DRAIN_FILE") == ""  # as the front door says
    user_namespace = not (builds or os.getenv("MPI_HOSTS"))
    tuning = threading.Thread(target=tune_listening_socket, args=(port,), name="tune", daemon=True)
    try:
        with prediction_directory(user_namespace=user_namespace):  # before there is any thread
            tuning.start()
            runpy.run_module("cog.server.http", run_name="__main__", alter_sys=True)
    except TritonStartFailed as error:
        _log.error("%s", error)
        sys.exit(1)


def _tune_if_listening(descriptor: int, port: int) -> bool:
    """Tune `descriptor` if it listens on `port`; it may be any file, or closed by now."""
    try:
        found = socket.socket(fileno=descriptor)  # a duplicate would hide the end from its peer
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
