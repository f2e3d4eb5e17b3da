"""Sandbox of a server: /dev/shm, a disk and a control group of its own, to be filled and stalled.

The mounts are in a namespace of the server's; the machine outside sees none of them. Without the
right to make one the server runs as it is, and the faults that need the sandbox are left out.
Control groups are of version 2 or 1.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SHM_MB, _DISK_MB = 512, 1024
_NAME = re.compile(r"cog-triton-(\d+)-.+")
_REMOVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where a server keeps its files; `group` is its control group, None where there is none."""

    work_dir: Path
    disk: Path | None
    group: Path | None

    def command(self, words: list[str]) -> list[str]:
        """The command line that runs `words` within it, as the same process."""
        steps, space = ["ulimit -c 0"], list[str]()
        if self.group is not None:
            steps.append(f"echo $$ > {self.group}/cgroup.procs")
        if self.disk is not None:
            space = ["unshare", "--mount", "--propagation", "private"]
            steps.append(f"mount -t tmpfs -o size={_SHM_MB}m tmpfs /dev/shm")
            steps.append(f"mount -o loop {self.disk} {self.work_dir}")
        return [*space, "sh", "-euc", "\n".join([*steps, 'exec "$@"']), "sh", *words]


@functools.cache
def no_mounts() -> str | None:
    """Why no server can have mounts of its own here; None if it can."""
    tools = ("unshare", "mount", "mkfs.ext4")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "not root"
    tried = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "x", "/mnt"],
        capture_output=True,
        text=True,
    )
    return (tried.stderr.strip() or "no mount namespaces") if tried.returncode else None


@contextmanager
def sandbox(directory: Path) -> Iterator[Sandbox]:
    """A sandbox below `directory`, which is a new one."""
    work_dir, disk, group_ = directory / "work", directory / "work.ext4", None
    work_dir.mkdir()
    with ExitStack() as stack:
        if no_group("cgroup.freeze") is None:
            group_ = stack.enter_context(group(directory.name, "cgroup.freeze"))
        if no_mounts() is not None:
            yield Sandbox(work_dir, None, group_)
            return
        with disk.open("wb") as file:
            file.truncate(_DISK_MB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(disk)], check=True)
        yield Sandbox(work_dir, disk, group_)


def unboxed(directory: Path) -> Sandbox:
    """No sandbox but a work directory: enough to kill and to stop processes."""
    (directory / "work").mkdir()
    return Sandbox(directory / "work", None, None)


def _hierarchies() -> set[Path]:
    """Where control groups of version 2, and those of memory of version 1, are mounted."""
    rows = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return {
        Path(where)
        for _, where, kind, options, *_ in rows
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
    }


def no_group(*files: str) -> str | None:
    """Why no group with any of these control files can be made; None if one can."""
    try:
        with group("probe", *files):
            return None
    except OSError as error:
        return str(error)


@contextmanager
def group(name: str, *files: str) -> Iterator[Path]:
    """A new group that has one of the control `files`; what is left in it is killed at the end.

    Raises OSError if there is none.
    """
    for root in _hierarchies():
        path = root / f"cog-triton-{os.getpid()}-{name}"
        with suppress(OSError):
            path.mkdir()
            if any((path / file).exists() for file in files):
                break
            path.rmdir()
    else:
        raise OSError(f"no control group with {' or '.join(files)}")
    try:
        yield path
    finally:
        _remove(path)


def clear() -> None:
    """Remove all groups of this process, and the empty ones of processes that have ended.

    An interrupt may come while a group is being removed, and SIGKILL at any time.
    """
    for root in _hierarchies():
        for path in root.glob("cog-triton-*"):
            owner = _NAME.fullmatch(path.name)
            if owner is None:
                continue
            if int(owner[1]) == os.getpid():
                _remove(path)
            elif not Path("/proc", owner[1]).exists():
                with suppress(OSError):  # one that is in use is another machine's, as of containers
                    path.rmdir()


def _remove(path: Path) -> None:
    """Kill what is in a group, and remove it; the kernel may need a moment after the last exit."""
    deadline = time.monotonic() + _REMOVAL_S
    while path.exists():
        for pid in (path / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it has ended meanwhile, as by the OOM killer
                os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)
