"""Out-of-memory kills: how many the kernel counted in our control group, and what that means."""

from __future__ import annotations

import re
from pathlib import Path

from cog_triton.system.host_memory import GROUPS, MOUNT, memory_groups

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_FILES = {2: "memory.events", 1: "memory.oom_control"}


class OomKills:
    """Kernel's count of processes killed for want of memory, compared with that at creation.

    Sources: memory.events of cgroup v2, memory.oom_control of v1.
    """

    def __init__(self, groups: Path = GROUPS, mount: Path = MOUNT) -> None:
        found = memory_groups(groups, mount)
        self._files = [group.directory / _FILES[group.version] for group in found]
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
