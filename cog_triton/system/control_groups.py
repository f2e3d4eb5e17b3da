"""Control groups of this process that bound memory, the most specific first (cgroups(7))."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Directory of a control group with a memory controller, of cgroup `version` 1 or 2."""

    directory: Path
    version: int


def memory_groups(groups: Path = GROUPS, mount: Path = MOUNT) -> list[MemoryGroup]:
    """Groups that may bound our memory, ancestors included; in a container, ours is the mount."""
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
