"""Use of Triton's own API: whether an engine may have died of a request that we did not send."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cog_triton.system.shared_time import SharedTime, SharedTimeReader
from cog_triton.system.tcp_sockets import tcp_sockets

_log = logging.getLogger(__name__)

TRITON_USE_VARIABLE = "COG_TRITON_TRITON_USE"
"""File of the shared time of the front door."""
_LEFT_AFTER_S = 60
_AFTER_S = 5.0


class TritonUseReport:
    """Use of Triton's own API through the door, which the worker reads when an engine has died.

    The time is inf while a request is in flight, else that of the end of the last one.
    """

    def __init__(self, file: Path) -> None:
        """`file`, which must be new, is where the worker finds it; raises OSError."""
        self.file = file
        _remove_left(file.parent)
        self._time = SharedTime(file)
        self._time.set(-math.inf)
        self._in_flight = 0

    @classmethod
    def made(cls, file: Path) -> TritonUseReport | None:
        """One in `file`, None where that cannot be made: the worker then blames nobody."""
        try:
            return cls(file)
        except OSError as error:
            _log.warning("no request is blamed for a death, as %s cannot be made: %s", file, error)
            file.unlink(missing_ok=True)
            return None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context of an inference request, until its response has ended."""
        self._in_flight += 1
        self._time.set(math.inf)
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._time.set(time.monotonic())


def _remove_left(directory: Path) -> None:
    """Remove the files of doors that were killed before their worker had read it."""
    for path in directory.glob("cog_triton_*_use_*"):
        with suppress(OSError):  # another user's, or in use: locked by its door
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > _LEFT_AFTER_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


class TritonUse:
    """Requests of others: over HTTP the front door tells of each, over gRPC connections are seen.

    A connection to gRPC is one that is open, that tritonserver's end closed in the last 60 s, or
    that `look` has seen just now: one that a death resets leaves no trace.
    """

    def __init__(self, grpc_port: int) -> None:
        self._grpc_port = grpc_port
        self._seen = -math.inf
        self._http: Callable[[], float] = lambda: -math.inf
        if name := os.environ.get(TRITON_USE_VARIABLE):
            try:
                self._http = SharedTimeReader(Path(name)).read
                Path(name).unlink()  # nobody else reads it, and nothing is left
            except OSError as error:  # it is not known, so nobody is blamed
                _log.warning("use of Triton's own API is not known: %s", error)
                self._http = lambda: math.inf

    def look(self) -> None:
        """Note whether there is a connection to gRPC; to be called again and again."""
        if _is_connected(self._grpc_port):
            self._seen = time.monotonic()

    def recent(self) -> bool:
        """Whether a death now may be of such a request: nobody else is to be blamed for it then."""
        if time.monotonic() - self._http() < _AFTER_S:
            which = "HTTP"
        elif time.monotonic() - self._seen < _AFTER_S or _is_connected(self._grpc_port):
            which = "gRPC"
        else:
            return False
        _log.warning("no stream is blamed for this: Triton's own API was in use (%s)", which)
        return True


def _is_connected(port: int) -> bool:
    """Whether there may be a TCP connection to `port` of this network namespace."""
    try:
        return any(tcp_sockets(listening=False, port=port))
    except OSError as error:  # no file descriptor is left to look with
        _log.warning("use of Triton's own API by gRPC is not known: %s", error)
        return True
