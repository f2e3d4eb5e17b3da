"""Runs a command as another user, which only root can do.

    python other_user.py UID command...

The interpreter may lie below a directory that only root enters: what leads to it is made visible
in a mount namespace.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

_NEWNS, _BIND, _RECURSIVE_SLAVE = 0x20000, 4096, 0x4000 | 0x80000
_LIBC = ctypes.CDLL(None, use_errno=True)


def become(user: int) -> None:
    """Become `user`, without capabilities or other groups."""
    if user == os.geteuid():
        return
    _call("unshare", _NEWNS)
    _call("mount", None, b"/", None, _RECURSIVE_SLAVE, None)
    links = (Path(sys.executable), Path(sys.executable).resolve())
    for directory in sorted({directory for link in links for directory in link.parents}):
        if not directory.stat().st_mode & 0o001:
            below = [link.relative_to(directory) for link in links if directory in link.parents]
            _show(directory, {directory / link.parts[0] for link in below})
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _show(directory: Path, entries: set[Path]) -> None:
    """Put an empty directory that all may enter over `directory`, with `entries` alone in it."""
    kept = {entry: tempfile.mkdtemp().encode() for entry in entries}
    for entry, place in kept.items():
        _call("mount", bytes(entry), place, None, _BIND, None)
    _call("mount", b"none", bytes(directory), b"tmpfs", 0, b"mode=755")
    for entry, place in kept.items():
        entry.mkdir()
        _call("mount", place, bytes(entry), None, _BIND, None)
        _call("umount2", place, 2)
        Path(os.fsdecode(place)).rmdir()


def _call(name: str, *arguments: object) -> None:
    numbers = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if getattr(_LIBC, name)(*numbers) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    become(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
