"""Run a command as a container of a root file system: what docker and NVIDIA's toolkit would do.

python container.py --root DIRECTORY [OPTION]... -- COMMAND...

The command is process 1 of its own process and mount namespaces, in chroot, as `--user`, with the
environment of `--env` alone; /proc, /sys, /dev with this machine's GPUs and /dev/shm are mounted,
and the driver's libraries. The network is this machine's. SIGTERM, SIGINT and SIGHUP are passed on,
and the exit code is the command's. Needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import resource
import signal
import sys
from pathlib import Path

import driver_files

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_RDONLY, _NOSUID, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG = 1
_PLAIN_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_TEMPORARY = ("tmp", "var/tmp")


def _check(done: int, what: str) -> None:
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    words = source.encode(), os.fsencode(target), kind.encode(), flags, data.encode()
    _check(_LIBC.mount(*words), f"mount {source} {target}")


def mount_point(root: Path, path: str | Path, *, is_directory: bool = True) -> Path:
    """`path` below `root`, made there; raises ValueError for a link."""
    target = driver_files.inside(root, path)
    if target.is_symlink():
        raise ValueError(f"{target}: is a link")
    if is_directory:
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    return target


def bind(source: Path, root: Path, path: str | Path, *, read_only: bool = False) -> None:
    """Bind a file or directory to `path` below `root`, where its mount point is made."""
    target = mount_point(root, path, is_directory=source.is_dir())
    mount(str(source), target, "", _BIND | _REC)
    if read_only:
        mount(str(source), target, "", _BIND | _REMOUNT | _RDONLY)


def prepare(root: Path, options: argparse.Namespace) -> None:
    """Mount everything but /proc, for which the process namespace must be there."""
    driver = driver_files.place(root)
    for name in ("proc", "sys", "dev", *_TEMPORARY):
        mount_point(root, name)
    for name in _TEMPORARY if options.read_only else ():
        mount("tmpfs", root / name, "tmpfs", _NOSUID, "mode=1777")
    for source, target in driver:
        bind(source, root, target.relative_to(root), read_only=True)
    mount("tmpfs", root / "dev", "tmpfs", _NOSUID, "mode=755")
    for source in [Path("/dev", name) for name in _PLAIN_DEVICES] + driver_files.devices():
        if source.exists():
            bind(source, root, source)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
    (root / "dev/fd").symlink_to("/proc/self/fd")
    (root / "dev/shm").mkdir()
    mount("tmpfs", root / "dev/shm", "tmpfs", _NOSUID, f"mode=1777,size={options.shm_size}")
    bind(Path("/sys"), root, "sys", read_only=True)
    for name in ("/etc/hosts", "/etc/resolv.conf"):
        if Path(name).exists():
            bind(Path(name), root, name, read_only=True)
    for pair, read_only in [(p, False) for p in options.bind] + [(p, True) for p in options.read]:
        source, _, target = pair.partition(":")
        bind(Path(source), root, target or source, read_only=read_only)


def enter(root: Path, options: argparse.Namespace) -> None:
    """Become the command."""
    mount("proc", root / "proc", "proc", _NOSUID)
    # coglet names its sockets after process ids, in the network namespace that all share here.
    Path(root, "proc/sys/kernel/ns_last_pid").write_text(str(random.randrange(1000, 30000)))
    if options.read_only:
        mount(str(root), root, "", _BIND | _REMOUNT | _RDONLY)
    os.chroot(root)
    os.chdir(options.workdir)
    environment = dict(pair.split("=", 1) for pair in options.env)
    user = options.user
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # as in docker's containers
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execvpe(options.command[0], options.command, environment)


def main() -> int:
    """Mount, fork, wait; returns the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", action="append", default=[], metavar="SOURCE[:TARGET]")
    parser.add_argument("--read", action="append", default=[], metavar="SOURCE[:TARGET]")
    parser.add_argument("--user", type=int, default=1000)
    parser.add_argument("--workdir", default="/")
    parser.add_argument("--shm-size", default="16g")
    parser.add_argument("--read-only", action="store_true", help="but for /tmp, /var/tmp, --bind")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.command = options.command[options.command[:1] == ["--"] :]
    root: Path = options.root.resolve()
    _check(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    mount("", Path("/"), "", _PRIVATE | _REC)
    mount(str(root), root, "", _BIND)
    prepare(root, options)
    # The first process from here on is process 1, and nothing can start once it has ended.
    _check(_LIBC.unshare(_CLONE_NEWPID), "unshare")
    child = os.fork()
    if not child:
        try:
            enter(root, options)
        except Exception as error:  # noqa: BLE001 - this process must end here
            print(f"container: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(127)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
