"""Free memory: what this machine and our control group leave, and what a process tree takes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cog_triton.system import reaper
from cog_triton.system.control_groups import GROUPS, MOUNT, MemoryGroup, memory_groups

_NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
_KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_memory(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = GROUPS, mount: Path = MOUNT
) -> int:
    """Bytes that may be taken before the kernel kills: of the machine, and of each control group.

    A group's file cache that is not in use counts as free, as MemAvailable counts it.
    """
    found = _AVAILABLE.search(meminfo.read_text())
    free = [int(found[1]) * _KIB] if found else []
    for group in memory_groups(groups, mount):
        with suppress(OSError, ValueError):
            free.append(_free_in(group))
    return max(0, min(free, default=0))


def memory_of(pids: Iterable[int]) -> int:
    """Proportional set size of processes together, in bytes; those that have ended count nothing.

    What several of them share counts once, and so do the mapped files of an engine (proc(5)).
    """
    total = 0
    for pid in pids:
        with suppress(OSError):
            found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
            total += int(found[1]) * _KIB if found else 0
    return total


def resident_bytes(root: int) -> int:
    """Host memory that the processes below `root` have; what two share counts twice."""
    found = 0
    for pid in reaper.descendants(root):
        with suppress(OSError, IndexError):
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return found


def _free_in(group: MemoryGroup) -> int:
    """Bytes that a group leaves; raises ValueError where it has no limit, OSError without files."""
    limit, usage, cache = _NAMES[group.version]
    allowed = int((group.directory / limit).read_text())  # `max` is no number
    used = int((group.directory / usage).read_text())
    stat = (group.directory / "memory.stat").read_text()
    found = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
    return allowed - used + (int(found[1]) if found else 0)
