"""Workaround: a /tmp/coglet that is not another user's, and removal of what predictions leave.

Delete when coglet takes the place of its directories from an option, and removes them. coglet
0.23.1 makes three for each prediction below `PLACE`, a literal of its compiled module, and keeps
them for ever. Whoever starts first owns `PLACE`: every prediction of another user fails then. A
tmpfs in a mount namespace of the server's own is private, and goes with its last process; who is
not root has one only where `PLACE` is another user's, for it takes a user namespace, too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
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


PLACE = Path("/tmp/coglet")
_PARTS = ("predictions", "output")
_TMPFS = b"mode=700,size=256m"  # for outputs above 6 MiB alone, which coglet passes on in files
_CHECK_S = 30
_STALE_S = 3600.0
_TRIES = 20
_RETRY_S = 0.05
_log = logging.getLogger(__name__)


def require_usable(*, user_namespace: bool = True) -> None:
    """Raise E2106 unless this user's server, in a `user_namespace` if need be, can use `PLACE`."""
    try:
        _require_own()
    except TritonStartFailed as error:
        if (refusal := namespace_refusal(user_namespace=user_namespace)) is not None:
            raise TritonStartFailed(f"{error.detail} ({refusal})") from None


def namespace_refusal(*, user_namespace: bool = True) -> str | None:
    """Why a server has no private `PLACE`; None if it has one, as another process tries."""
    command = [sys.executable, "-m", "cog_triton.serving.coglet.prediction_directory"]
    try:
        namespaces(_only_mounts(user_namespace))
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_S)
    except (OSError, subprocess.SubprocessError) as error:
        return getattr(error, "strerror", None) or str(error)
    reason = tried.stderr.strip().rpartition("\n")[2]
    return (reason[-200:] or "it failed") if tried.returncode else None


@contextmanager
def prediction_directory(*, user_namespace: bool = True) -> Iterator[str | None]:
    """Context of a Cog server: why `PLACE` is shared with others of its user; None if it is not.

    Only for a process of one thread. A lock on the directory tells other servers, and
    systemd-tmpfiles, that removing it would end the mounts over it; the last one removes it.

    Raises:
        TritonStartFailed: another user has it, or it cannot be made.
    """
    lock = _shared_lock()
    refusal = _enter(user_namespace)
    try:
        yield refusal
    finally:
        if refusal is None:
            unmount(PLACE)
        if lock is not None:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if refusal is not None:
                    _sweep(older_than=0.0)
                for path in (*(PLACE / part for part in _PARTS), PLACE):
                    with suppress(FileNotFoundError):
                        path.rmdir()
            os.close(lock)


def remove(prediction_id: str) -> None:
    """Remove the directories of a prediction that has ended, unless coglet left a file in them."""
    if prediction_id in ("", ".", "..") or "/" in prediction_id:
        return
    directory = PLACE / _PARTS[0] / prediction_id
    for path in (directory / "inputs", directory / "outputs", directory):
        with suppress(OSError):
            path.rmdir()


def _shared_lock() -> int | None:
    """Descriptor that holds a shared lock on `PLACE`, made if need be; None if it gets none.

    A server that stops has the other kind for a moment, and may remove `PLACE`; any user may keep
    that kind for ever, so the wait is short.
    """
    reason = ""
    for _ in range(_TRIES):
        with suppress(OSError):
            PLACE.mkdir()
            PLACE.chmod(0o755)  # whatever the umask is: others lock it, too
        try:
            lock = os.open(PLACE, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # of another user, who lets nobody read it, or no directory
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), PLACE.lstat()):
                return lock
            reason = "it is made anew again and again"
        except OSError as error:
            reason = str(error.strerror)
        os.close(lock)
        time.sleep(_RETRY_S)
    _log.warning("%s cannot be locked, and may be removed in use: %s", PLACE, reason)
    return None


def _enter(user_namespace: bool) -> str | None:
    """Make `PLACE` private; or why it is shared, where it may be."""
    try:
        flags = namespaces(_only_mounts(user_namespace))
        attempt(flags, PLACE, _TMPFS)
    except OSError as error:
        _require_own()
        _sweep(older_than=_STALE_S)
        return error.strerror
    try:
        mount(flags, PLACE, _TMPFS)
    except OSError as error:  # half-way in a namespace, where a server must not run
        raise _refused(f"{PLACE} cannot be made private: {error.strerror}") from None
    return None


def _only_mounts(user_namespace: bool) -> str | None:
    """Why no user namespace is entered; None if one may be."""
    if not user_namespace:
        return "neither builds nor MPI_HOSTS work in a user namespace"
    with suppress(TritonStartFailed):
        _require_own()
        return "no other user has it"
    return None


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


def _sweep(older_than: float) -> None:
    """Remove what a server that was killed left; another Cog of this user may have the newer."""
    with suppress(OSError):
        for path in (PLACE / _PARTS[0]).iterdir():
            if path.lstat().st_mtime <= time.time() - older_than:
                remove(path.name)


if __name__ == "__main__":
    try:
        with prediction_directory() as why_shared:
            sys.exit(why_shared)
    except TritonStartFailed as refused:
        sys.exit(str(getattr(refused.__context__, "strerror", refused)))
