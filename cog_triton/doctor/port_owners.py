"""Owners of TCP ports: whether a taken one is that of our own server."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_SERVER = b"cog_triton.door"


def own_server(ports: Collection[int]) -> dict[int, int]:
    """Process id of the front door for each of `ports` that it, or a child of it, listens on.

    Only what this user may see of other processes is known.
    """
    inodes = dict(_listeners(ports))
    found: dict[int, int] = {}
    if not inodes:
        return found
    for process in _PROC.iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                match = _SOCKET.fullmatch(str(descriptor.readlink()))
                if match and (port := inodes.get(match[1])) and (door := _door(int(process.name))):
                    found[port] = door
    return found


def _listeners(ports: Collection[int]) -> Iterator[tuple[str, int]]:
    """(inode of the socket, port) of the listeners of this machine."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == _LISTENING and port in ports:
                    yield fields[9], port


def _door(process: int) -> int | None:
    """The front door that `process` is, or is below of."""
    while process > 0:
        directory = _PROC / str(process)
        try:
            if _SERVER in (directory / "cmdline").read_bytes().split(b"\0"):
                return process
            status = (directory / "stat").read_text("utf-8", "replace")
        except OSError:
            return None
        process = int(status.rpartition(")")[2].split()[1])
    return None
