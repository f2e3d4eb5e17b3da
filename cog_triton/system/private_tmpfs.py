"""Private tmpfs: one over a directory that only this process and its children see."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path

from cog_triton.system.local_socket import overflow_uid

_NEWNS, _NEWUSER = 0x0002_0000, 0x1000_0000
_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_RECURSIVE_SLAVE = 0x4000 | 0x8_0000
_SYS_ADMIN = 1 << 21
_CAPABILITIES_V3 = 0x2008_0522
_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def namespaces(only_mounts: str | None = None) -> int:
    """Flags of the namespaces that this process would enter: of mounts, and of users without root.

    Raises PermissionError, with the reason, where it may not; `only_mounts` is one for users. In
    another user namespace, capabilities are lost, and every other user has the overflow uid.
    """
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*(\w+)$", status, re.MULTILINE)
    capabilities = int(found[1], 16) if found else 0
    if capabilities & _SYS_ADMIN:
        return _NEWNS
    if capabilities:
        only_mounts = "CAP_SYS_ADMIN is missing"
    elif os.geteuid() == overflow_uid():
        only_mounts = only_mounts or "in a user namespace, all others would have our uid, too"
    if only_mounts is not None:
        raise PermissionError(errno.EPERM, only_mounts)
    return _NEWNS | _NEWUSER


def attempt(flags: int, place: Path, options: bytes) -> None:
    """Have a child do all that `mount` does; raises its OSError.

    What a refusal leaves half-made, such as all capabilities in a user namespace, ends with it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mount(flags, place, options)
            code = 0
        except OSError as error:
            os.write(writer, str(error.strerror).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        reason = file.read()
    if os.waitpid(child, 0)[1]:
        raise PermissionError(errno.EPERM, reason or "the process that tried it has died")


def mount(flags: int, place: Path, options: bytes) -> None:
    """Enter the namespaces of `flags`, and mount a tmpfs over the directory `place` in them.

    Only for a process of one thread, and after `attempt`: one that fails half-way must end.
    """
    user, group = os.geteuid(), os.getegid()
    _libc("unshare", flags)
    if flags & _NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _libc("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE_SLAVE), None)
    # By its descriptor: a link that another user puts there is not followed.
    found = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    target = b"/proc/self/fd/%d" % found
    _libc("mount", b"tmpfs", target, b"tmpfs", ctypes.c_ulong(_NOSUID_NODEV_NOEXEC), options)
    os.close(found)
    if flags & _NEWUSER:  # else the worker, which has none, may not look at this process
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
        _libc("capset", header, (ctypes.c_uint32 * 6)())


def unmount(place: Path) -> None:
    """Unmount what `mount` did; a user namespace does not allow it any more, and ends with it."""
    _LIBC.umount2(bytes(place), _DETACH)


def _libc(call: str, *arguments: object) -> None:
    if getattr(_LIBC, call)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
