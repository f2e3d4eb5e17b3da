"""Child process that runs a module of the package and answers over a socket; it ends with us.

A request is bytes, or the call of a function: arguments and results cross as annotations tell.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import GenericAlias, MappingProxyType
from typing import Any, get_type_hints

import msgspec

import cog_triton
from cog_triton.errors import CogTritonError, from_text
from cog_triton.ipc.framing import LENGTH, MAX_FRAME, check

READY = b"G"
"""Kind of what a child sends first, before any request."""
_KIND = 1  # bytes of a reply that are its kind
_MOST_READY = 64 << 10
# Such work needs none of the server's secrets. A server's processes are found by its directory.
_ENVIRONMENT = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL"),
    "COG_TRITON_WORK_DIR",
)


class PythonChild:
    """Takes one request after the other, each a frame and its reply; of one thread at a time."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        timeout: float,
        python: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it, with the socket's descriptor and `arguments` in its command line.

        `python` is one with packages of its own; `variables` are of its environment, PYTHONPATH
        among them, which leads to this package.

        Raises:
            OSError: it does not get ready. Nothing may take longer than `timeout` seconds.
        """
        package = str(Path(cog_triton.__file__).resolve().parents[1])
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, sys.path)])
        command = [sys.executable, "-S"] if python is None else [str(python)]
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(timeout)
        with theirs:
            words = [str(theirs.fileno()), *map(str, arguments)]
            self.process = subprocess.Popen(
                [*command, "-m", module, *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**environment, **variables},
                cwd="/",
            )
        try:
            self.ready = bytes(_received(self.connection, _MOST_READY)[_KIND:])
        except OSError as error:
            raise ConnectionError(f"it ended with {self.close()}") from error

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def send(self, data: bytes) -> None:
        """Send a request; raises OSError if it has ended or does not read."""
        check(len(data), MAX_FRAME)
        self.connection.sendall(LENGTH.pack(len(data)))
        self.connection.sendall(data)

    def receive(self, most: int) -> tuple[bytes, memoryview]:
        """The reply's kind, one byte, and its data; OSError if it has ended or sends no answer,
        or more than `most` bytes."""
        reply = _received(self.connection, _KIND + most)
        return bytes(reply[:_KIND]), reply[_KIND:]

    def close(self) -> int:
        """Kill it; its exit code."""
        self.connection.close()
        self.process.kill()
        return self.process.wait()


def serve(
    descriptor: int, answer: Callable[[memoryview], tuple[bytes, bytes]], ready: bytes = b""
) -> None:
    """Answer requests in the child, each by a kind and data, until the parent hangs up.

    `ready` is the data of what tells that it is ready.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    with socket.socket(fileno=descriptor) as connection, suppress(ConnectionError):
        connection.sendall(LENGTH.pack(_KIND + len(ready)) + READY + ready)
        while True:
            kind, data = answer(_received(connection, MAX_FRAME))
            connection.sendall(LENGTH.pack(_KIND + len(data)) + kind)
            connection.sendall(data)
            del data


def limit(memory_bytes: int) -> None:
    """Limit what is allocated from now on, and forbid files and core dumps."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))


def _received(connection: socket.socket, most: int) -> memoryview:
    """A frame's payload, of at most so many bytes; raises ConnectionError if it does not come."""
    (size,) = LENGTH.unpack(_bytes_of(connection, LENGTH.size))
    check(size, most)
    return _bytes_of(connection, size)


def _bytes_of(connection: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    got = 0
    while got < size:
        read = connection.recv_into(buffer[got:])
        if not read:
            raise ConnectionResetError("the other process has ended")
        got += read
    return buffer


_RETURNED, _RAISED = b"R", b"E"
_hints = cache(get_type_hints)


def call(where: PythonChild, function: Callable[..., Any], *arguments: object) -> Any:
    """The result of a module's function there; raises the coded error that it raises.

    OSError if the child has ended or does not answer in time; RuntimeError for another error of
    the function's.
    """
    called = function.__module__, function.__qualname__, arguments
    where.send(msgspec.msgpack.encode(called))
    kind, data = where.receive(MAX_FRAME - 1)
    if kind == _RAISED:
        text = str(data, "utf-8", "replace")
        raise from_text(text) or RuntimeError(text)
    return msgspec.msgpack.decode(data, type=_hints(function).get("return", Any))


def serve_calls(descriptor: int) -> None:
    """Carry out calls in the child, until the parent hangs up."""
    serve(descriptor, _called)


def _called(request: memoryview) -> tuple[bytes, bytes]:
    module, name, arguments = msgspec.msgpack.decode(request, type=tuple[str, str, msgspec.Raw])
    function = getattr(importlib.import_module(module), name)
    given = tuple(kind for parameter, kind in _hints(function).items() if parameter != "return")
    kinds = GenericAlias(tuple, given) if given else list
    try:
        result = function(*msgspec.msgpack.decode(arguments, type=kinds))
        return _RETURNED, msgspec.msgpack.encode(result)
    except CogTritonError as error:
        raised = str(error)
    except Exception as error:  # noqa: BLE001 - raised in the parent
        raised = f"{type(error).__name__}: {error}"
    return _RAISED, raised.encode("utf-8", "replace")
