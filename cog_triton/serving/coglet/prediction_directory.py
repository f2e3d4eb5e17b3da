"""Workaround: a private /tmp/coglet for each Cog server, and removal of what predictions leave.

Delete when coglet takes the place of its directories from an option, and removes them. coglet
0.23.1 makes three for each prediction below `PLACE`, a literal of its compiled module, and keeps
them for ever. Whoever starts first owns `PLACE`: every prediction of another user fails then. A
tmpfs in a mount namespace of the server's own is private, and goes with its last process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cog_triton.errors import TritonStartFailed

PLACE = Path("/tmp/coglet")
_PARTS = ("predictions", "output")
_TMPFS = b"mode=700,size=256m"  # for outputs above 6 MiB alone, which coglet passes on in files
_NEWNS, _NEWUSER = 0x0002_0000, 0x1000_0000
_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_RECURSIVE_SLAVE = 0x4000 | 0x8_0000
_CAPABILITIES_V3 = 0x2008_0522
_DETACH = 2
_CHECK_S = 30
_STALE_S = 3600.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def require_usable() -> None:
    """Raise E2106 unless a server of this user can have its predictions below `PLACE`."""
    try:
        _require_own()
    except TritonStartFailed as error:
        if (refusal := namespace_refusal()) is not None:
            raise TritonStartFailed(f"{error.detail} ({refusal})") from None


def namespace_refusal() -> str | None:
    """Why this machine allows no private `PLACE`; None if it does, tried in another process."""
    command = [sys.executable, "-m", "cog_triton.serving.coglet.prediction_directory"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_S, check=False)
    return (tried.stderr.strip()[-200:] or "it failed") if tried.returncode else None


@contextmanager
def prediction_directory() -> Iterator[str | None]:
    """Context of a Cog server: why `PLACE` is shared with others of its user; None if it is not.

    Only for a process of one thread. A lock on the directory tells other servers, and
    systemd-tmpfiles, that it is in use: removing it would end the mounts over it. The last one
    removes it.

    Raises:
        TritonStartFailed: another user has it, or it cannot be made.
    """
    with suppress(OSError):
        PLACE.mkdir()
        PLACE.chmod(0o755)  # whatever the umask is: others lock it, too
    lock = -1
    with suppress(OSError):  # of another user, who lets nobody read it
        lock = os.open(PLACE, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    refusal = None
    try:
        _mount_private()
    except OSError as error:
        refusal = error.strerror
        _require_own()
        _sweep()
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield refusal
    finally:
        if refusal is None:
            _LIBC.umount2(bytes(PLACE), _DETACH)  # not allowed any more in a user namespace
        else:
            _sweep()
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in (*(PLACE / part for part in _PARTS), PLACE):
                with suppress(FileNotFoundError):
                    path.rmdir()


def remove(prediction_id: str) -> None:
    """Remove the directories of a prediction that has ended, unless coglet left a file in them."""
    if prediction_id in ("", ".", "..") or "/" in prediction_id:
        return
    directory = PLACE / _PARTS[0] / prediction_id
    for path in (directory / "inputs", directory / "outputs", directory):
        with suppress(OSError):
            path.rmdir()


def _mount_private() -> None:
    """Mount a tmpfs over `PLACE` that only this process and its children see.

    Where we have capabilities, the user namespace stays: in another one they would be lost.
    """
    PLACE.lstat()
    status = Path("/proc/self/status").read_text()
    has_capabilities = re.search(r"^CapEff:\s*0*$", status, re.MULTILINE) is None
    user, group = os.geteuid(), os.getegid()
    _libc("unshare", _NEWNS if has_capabilities else _NEWNS | _NEWUSER)
    if not has_capabilities:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _libc("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE_SLAVE), None)
    flags = ctypes.c_ulong(_NOSUID_NODEV_NOEXEC)
    _libc("mount", b"coglet", bytes(PLACE), b"tmpfs", flags, _TMPFS)
    if not has_capabilities:  # else the worker, which has none, may not look at this process
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
        _libc("capset", header, (ctypes.c_uint32 * 6)())


def _require_own() -> None:
    for path in (PLACE, *(PLACE / part for part in _PARTS)):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        except OSError:
            raise _refused(f"{path} cannot be read") from None
        if not stat.S_ISDIR(found.st_mode):
            raise _refused(f"{path} is no directory")
        if found.st_uid != os.geteuid():
            raise _refused(f"{path} belongs to the user {_name(found.st_uid)}")
    existing = PLACE if PLACE.is_dir() else PLACE.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _refused(f"{existing} cannot be written")


def _refused(reason: str) -> TritonStartFailed:
    return TritonStartFailed(
        f"{reason}, and no setting moves what Cog writes there for each prediction: have its owner"
        " stop their server and remove it, run this one as that user or in a container with a"
        " writable /tmp, or allow user namespaces, in which each server has its own (sysctl"
        " user.max_user_namespaces, kernel.unprivileged_userns_clone=1,"
        " kernel.apparmor_restrict_unprivileged_userns=0)"
    )


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return str(user)


def _sweep() -> None:
    """Remove what a server that was killed left; another Cog of this user may have the newer."""
    with suppress(OSError):
        for path in (PLACE / _PARTS[0]).iterdir():
            if path.lstat().st_mtime < time.time() - _STALE_S:
                remove(path.name)


def _libc(call: str, *arguments: object) -> None:
    if getattr(_LIBC, call)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        with prediction_directory() as why_shared:
            sys.exit(why_shared)
    except TritonStartFailed as refused:
        sys.exit(str(getattr(refused.__context__, "strerror", refused)))
