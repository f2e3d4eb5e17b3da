"""Host memory that is left for this process: of the machine, and of its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 where v2 writes "max"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that are left, and what `limits` them, in words."""

    free: int
    limits: str


def host_memory(
    meminfo: Path = _MEMINFO, groups: Path = _GROUPS, mount: Path = _MOUNT
) -> HostMemory:
    """Measure what is left: MemAvailable, or less where a control group has less.

    What a group holds of files' pages counts as left: the kernel drops them for it.
    """
    available = int(re.findall(r"MemAvailable: *(\d+)", meminfo.read_text())[0]) * 1024
    found = [HostMemory(available, "MemAvailable of the machine")]
    for directory, limit, used in _group_files(groups, mount):
        try:
            most = directory.joinpath(limit).read_text().strip()
            if not most.isdecimal() or int(most) >= _UNLIMITED:
                continue
            held = int(directory.joinpath(used).read_text())
            stat = re.search(
                r"^inactive_file (\d+)$", (directory / "memory.stat").read_text(), re.M
            )
        except OSError:
            continue
        left = int(most) - held + (int(stat[1]) if stat else 0)
        found.append(HostMemory(max(0, left), f"{directory / limit} of {int(most) / 1e9:.1f} GB"))
    return min(found, key=lambda one: one.free)


def _group_files(groups: Path, mount: Path) -> Iterator[tuple[Path, str, str]]:
    """Directories of our control group and all above it, and names of their limit and use."""
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = mount, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = mount / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            yield group, *names
            group = group.parent
