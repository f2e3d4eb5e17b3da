"""Control groups of our own, version 2 or 1: to suspend a server, or bound a memory."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(r"cog-triton-(\d+)-.+")
_DEADLINE_S = 10.0
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")


def mounts() -> dict[str, Path]:
    """Where the hierarchies are mounted: "v2", and controllers of version 1 by name."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("v2", Path(where))
        elif kind == "cgroup":
            found |= {name: Path(where) for name in options.split(",") if name == "memory"}
    return found


def lacking(*files: str) -> str | None:
    """Why no group with any of these control files can be made; None if one can."""
    return None if _root_for(files) else f"no control group with {' or '.join(files)}"


def _root_for(files: tuple[str, ...]) -> Path | None:
    for root in mounts().values():
        probe = root / f"cog-triton-{os.getpid()}-probe"
        try:
            probe.mkdir()
        except OSError:
            continue
        try:
            if any((probe / file).exists() for file in files):
                return root
        finally:
            probe.rmdir()
    return None


@contextmanager
def group(name: str, *files: str) -> Iterator[Path]:
    """A new group that has one of the control `files`; what is left in it is killed at the end."""
    root = _root_for(files)
    if root is None:
        raise OSError(lacking(*files))
    path = root / f"cog-triton-{os.getpid()}-{name}"
    path.mkdir()
    try:
        yield path
    finally:
        _remove(path)


def clear() -> None:
    """Remove all groups of this process, and the empty ones of processes that have ended.

    An interrupt may come while a group is being removed, and SIGKILL at any time.
    """
    for root in mounts().values():
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
    deadline = time.monotonic() + _DEADLINE_S
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


def freeze(path: Path, frozen: bool) -> None:
    """Suspend all processes of the group (version 2), or let them go on."""
    (path / "cgroup.freeze").write_text(str(int(frozen)))


def limit_memory(path: Path, size: int) -> None:
    """Bound the group's memory, in bytes."""
    file = next(path / name for name in _MEMORY_LIMITS if (path / name).exists())
    file.write_text(str(size))


def add(path: Path, pid: int) -> None:
    """Move a process into the group, with all its threads."""
    (path / "cgroup.procs").write_text(str(pid))
