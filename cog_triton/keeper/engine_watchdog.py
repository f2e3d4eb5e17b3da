"""Watchdog of an engine process: notices one that was stopped, or hangs.

A process hangs whose step is overdue while all of its threads sleep and use no CPU, look after
look. A step that computes, or waits for a disk or for its turn on a busy CPU, is none, however long
it takes: prompts of 100,000 tokens take minutes on a CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cog_triton.keeper.engine_progress import ProgressReader
from cog_triton.system import reaper

_PERIOD_S = 0.25
_SLEEPING_LOOKS = 8
_DESCENDANTS_LOOKS = 20


class HangDetector:
    """Looks at one process four times a second; counts looks, not time, which may have stood still.

    `due` tells when its next step is due, by time.monotonic().
    """

    def __init__(self, pid: int, due: Callable[[], float], looks: int = _SLEEPING_LOOKS) -> None:
        self._pid = pid
        self._due = due
        self._looks = looks
        self._seen: tuple[float, int] | None = None
        self._count = 0

    def hangs(self) -> bool:
        """Look once; whether it hangs."""
        due = self._due()
        seen = (due, _cpu_time(self._pid)) if due <= time.monotonic() else None
        same = seen is not None and seen == self._seen and _sleeps(self._pid)
        self._count = self._count + 1 if same else 0
        self._seen = seen
        return self._count >= self._looks


async def watch(pid: int, root: int, descriptor: int | None) -> str:
    """Watch the engine process `pid` and all below the process `root`; returns what is wrong.

    `descriptor` is that of its `ProgressRecord`; without one, a hang is not noticed here.
    """
    detector = None
    if descriptor is not None:
        detector = HangDetector(pid, ProgressReader(pid, descriptor).due)
    looks = 0
    pids: set[int] = set()
    while True:
        if looks % _DESCENDANTS_LOOKS == 0:
            pids = reaper.descendants(root)
        looks += 1
        for one in pids:
            if _state(Path(f"/proc/{one}/stat")) == "T":
                return f"process {one} of the engine was stopped"
        if detector is not None and detector.hangs():
            seconds = _SLEEPING_LOOKS * _PERIOD_S
            return f"the engine's process ({pid}) hangs: asleep for {seconds:g} s amid its work"
        await asyncio.sleep(_PERIOD_S)


def _fields(stat: Path) -> list[str]:
    """The fields of proc(5)'s stat from the state on; empty if the process is gone."""
    with suppress(OSError):
        return stat.read_text("utf-8", "replace").rpartition(")")[2].split()
    return []


def _state(stat: Path) -> str:
    return (_fields(stat) or [""])[0]


def _cpu_time(pid: int) -> int:
    """CPU time of a process with all its threads, in ticks of the kernel's."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return int(fields[11]) + int(fields[12]) if fields else 0


def _sleeps(pid: int) -> bool:
    """Whether all threads sleep: none runs, waits for a CPU (R) or for a disk (D)."""
    return all(_state(stat) in ("S", "I") for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
