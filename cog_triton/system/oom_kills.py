"""Out-of-memory kills: how many the kernel counted in our control group, and what that means."""

from __future__ import annotations

import re
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


class OomKills:
    """Kernel's count of processes killed for want of memory, compared with that at creation.

    Sources: memory.events of cgroup v2, memory.oom_control of v1.
    """

    def __init__(self, groups: Path = _GROUPS, mount: Path = _MOUNT) -> None:
        self._files = list(_files(groups, mount))
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
                found = _COUNT.search(file.read_text())
            except OSError:
                continue
            if found:
                return int(found[1])
        return 0


def _files(groups: Path, mount: Path) -> list[Path]:
    """Files with the count, the most specific first; in a container, our group is the mount."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for fields in lines:
        if len(fields) < 3:
            continue
        group = fields[2].lstrip("/")
        if not fields[1]:
            found += [mount / group / "memory.events", mount / "memory.events"]
        elif "memory" in fields[1].split(","):
            v1 = mount / "memory"
            found += [v1 / group / "memory.oom_control", v1 / "memory.oom_control"]
    return found
