"""Runs a command as another user, or without what docker refuses; only root can do the first.

    python other_user.py [--no-namespaces] [--no-mounts] UID command...

The interpreter may lie below a directory of root's alone: what leads to it is made visible in a
mount namespace. Namespaces are refused as docker's seccomp profile refuses them, mounts in those
that are allowed as AppArmor refuses them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path

_NEWNS, _BIND, _RECURSIVE_SLAVE = 0x20000, 4096, 0x4000 | 0x80000
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_UNSHARE = {"x86_64": 272, "aarch64": 97}[platform.machine()]
_MOUNT = {"x86_64": 165, "aarch64": 40}[platform.machine()]
_EPERM = 0x0005_0000 | 1
_ALLOW = 0x7FFF_0000
_LIBC = ctypes.CDLL(None, use_errno=True)


def refuse(number: int) -> None:
    """Make the system call `number` fail with EPERM in this process and its children."""
    # Load the number of the call; if it is this one, return EPERM; else allow.
    words = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, _EPERM), (0x06, 0, 0, _ALLOW)]
    program = b"".join(struct.pack("HBBI", *word) for word in words)
    buffer = ctypes.create_string_buffer(program)
    filters = struct.pack("HxxxxxxP", len(words), ctypes.addressof(buffer))
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _SET_SECCOMP, _FILTER, filters, 0, 0)


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


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--no-namespaces", action="store_true")
    parser.add_argument("--no-mounts", action="store_true")
    parser.add_argument("user", type=int)
    options, command = parser.parse_known_args()
    become(options.user)
    if options.no_namespaces:
        refuse(_UNSHARE)
    if options.no_mounts:
        refuse(_MOUNT)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
