"""Host memory: what machine and control groups leave, what processes take, and who is killed."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cog_triton.system import reaper

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
_NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_OOM_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_OOM_FILES = {2: "memory.events", 1: "memory.oom_control"}
_KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Directory of a control group with a memory controller, of cgroup `version` 1 or 2."""

    directory: Path
    version: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that may be taken before the kernel kills, and what `limits` them, in words."""

    free: int
    limits: str


def memory_groups(groups: Path = GROUPS, mount: Path = MOUNT) -> list[MemoryGroup]:
    """Groups that may bound our memory, the most specific first (cgroups(7)).

    Ancestors are included; in a container, ours is the mount.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for fields in lines:
        if len(fields) < 3:
            continue
        unified = not fields[1]
        if unified or "memory" in fields[1].split(","):
            root = mount if unified else mount / "memory"
            own = root / fields[2].lstrip("/")
            nested = [own, *(path for path in own.parents if path.is_relative_to(root))]
            found += [MemoryGroup(path, 2 if unified else 1) for path in dict.fromkeys(nested)]
    return found


def host_memory(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = GROUPS, mount: Path = MOUNT
) -> HostMemory:
    """Measure what is left: MemAvailable, or less where a control group has less.

    A group's file cache that is not in use counts as free, as MemAvailable counts it.
    """
    found = [
        HostMemory(int(kilobytes) * _KIB, "MemAvailable of the machine")
        for kilobytes in _AVAILABLE.findall(meminfo.read_text())
    ]
    for group in memory_groups(groups, mount):
        with suppress(OSError, ValueError):
            found.append(_left_in(group))
    return min(found, key=lambda one: one.free, default=HostMemory(0, "no MemAvailable"))


def resident_bytes(root: int) -> int:
    """Host memory of a process and all below it; what two share counts twice."""
    found = 0
    for pid in {root, *reaper.descendants(root)}:
        with suppress(OSError, IndexError):
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return found


def _left_in(group: MemoryGroup) -> HostMemory:
    """What a group leaves; raises ValueError where it has no limit, OSError without files."""
    limit, usage, cache = _NAMES[group.version]
    allowed = int((group.directory / limit).read_text())  # `max` is no number
    used = int((group.directory / usage).read_text())
    stat = (group.directory / "memory.stat").read_text()
    found = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
    left = max(0, allowed - used + (int(found[1]) if found else 0))
    return HostMemory(left, f"{group.directory / limit} of {allowed / 1e9:.1f} GB")


class OomKills:
    """Kernel's count of processes killed for want of memory, compared with that at creation.

    Sources: memory.events of cgroup v2, memory.oom_control of v1.
    """

    def __init__(self, groups: Path = GROUPS, mount: Path = MOUNT) -> None:
        found = memory_groups(groups, mount)
        self._files = [group.directory / _OOM_FILES[group.version] for group in found]
        self._before = self._count()

    def hint(self) -> str:
        """Suffix of an error: that a process was killed, and what to do; blank if none was."""
        if self._count() <= self._before:
            return ""
        return (
            "; the kernel killed a process for want of memory (the limit of this container or"
            " control group): give it more, or serve a smaller engine"
        )

    def _count(self) -> int:
        for file in self._files:
            try:
                found = _OOM_COUNT.search(file.read_text())
            except OSError:
                continue
            if found:
                return int(found[1])
        return 0
