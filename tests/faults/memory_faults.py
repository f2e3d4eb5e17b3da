"""Faults of memory: a process that the kernel's OOM killer chooses in its control group."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

from faults import cgroups

_LIMITS = ("memory.max", "memory.limit_in_bytes")
_LIMIT, _BALLAST = 16 << 20, 64 << 20
_DEADLINE_S = 20.0
_NEVER = -1000
# Is exempt from the OOM killer, joins the group, and asks for more than the group may have.
_GREEDY = """
import os, sys
open("/proc/self/oom_score_adj", "w").write("{never}")
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
held = b"x" * {size}
os.read(0, 1)
"""


def lacking() -> str | None:
    """Why no process can be made to run out of memory here; None if one can."""
    return "not root" if os.geteuid() != 0 else cgroups.lacking(*_LIMITS)


async def oom_kill(pid: int) -> None:
    """Have the OOM killer end process `pid`; raises RuntimeError if it lives."""
    with cgroups.group(f"memory-{pid}", *_LIMITS) as path:
        cgroups.limit_memory(path, _LIMIT)
        cgroups.add(path, pid)
        greedy = await _ask_for_memory(path)
        try:
            for _ in range(round(_DEADLINE_S / 0.02)):
                if not Path(f"/proc/{pid}/cmdline").exists() or not _alive(pid):
                    return
                if greedy.returncode is not None:
                    greedy = await _ask_for_memory(path)
                await asyncio.sleep(0.02)
            raise RuntimeError(f"process {pid} lives on in a group without memory")
        finally:
            with suppress(ProcessLookupError):  # it ends by itself when it gets no memory
                greedy.kill()
            await greedy.wait()


async def _ask_for_memory(group: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _GREEDY.format(never=_NEVER, size=_BALLAST), str(group)),
        stdin=asyncio.subprocess.PIPE,
    )


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
