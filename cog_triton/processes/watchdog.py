"""Watchdog of an engine process: notices one that was stopped, or hangs.

A process hangs whose next step is overdue while all of its threads sleep and use
no CPU, look after look. A step that computes, or waits for a disk or for its turn on a busy CPU, is
none, however long it takes: prompts of 100,000 tokens take minutes on a CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cog_triton.system.process_state import stat_fields, stopped

_PERIOD_S = 0.25
_SLEEPING_LOOKS = 8
_PIDS_LOOKS = 8


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


async def watch(what: str, pid: int, pids: Callable[[], set[int]], due: Callable[[], float]) -> str:
    """Watch `pid`, the main process of `what`, and all of `pids`; returns what is wrong.

    For `due`, see `HangDetector`.
    """
    detector = HangDetector(pid, due)
    looks, watched = 0, {pid}
    while True:
        if looks % _PIDS_LOOKS == 0:
            with suppress(OSError):  # no file descriptor is left to look with
                watched = pids()
        looks += 1
        if (one := stopped(watched)) is not None:
            return f"process {one} of {what} was stopped"
        if detector.hangs():
            seconds = _SLEEPING_LOOKS * _PERIOD_S
            return f"{what}'s process ({pid}) hangs: asleep for {seconds:g} s amid its work"
        await asyncio.sleep(_PERIOD_S)


def _cpu_time(pid: int) -> int:
    """CPU time of a process with all its threads, in ticks of the kernel's."""
    fields = stat_fields(Path(f"/proc/{pid}/stat"))
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _sleeps(pid: int) -> bool:
    """Whether all threads sleep: none runs, waits for a CPU (R) or for a disk (D)."""
    with suppress(OSError):  # no file descriptor is left to look with
        states = [stat_fields(stat)[:1] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(state in (["S"], ["I"]) for state in states)
    return False
