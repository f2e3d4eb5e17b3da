"""Watchdog of our processes: notices one that was stopped, or hangs.

A process hangs whose next step is overdue while all its threads sleep and use no CPU, look after
look. A step that computes, or waits for a disk or a busy CPU, is none, however long it takes:
prompts of 100,000 tokens take minutes on a CPU.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cog_triton.processes.child import Child
from cog_triton.system import reaper
from cog_triton.system.process_state import process_state, stat_fields

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5
_SLEEPING_LOOKS = 4
_PIDS_LOOKS = 4


async def watch(
    what: str, child: Child, due: Callable[[], float] = lambda: math.inf, *, mends: bool = False
) -> str:
    """Watch the main process of `what`, and all below it, to its end.

    Returns what is wrong, as soon as something is; blank if the process has ended.
    `due` says when its next step is due, by time.monotonic(). Looks count, twice a second, not
    time, which may have stood still. A process that `mends` starts its own ones again: of those
    one that was stopped is killed, and nothing else.
    """
    seen: tuple[float, int] | None = None
    look, sleeping, pid = 0, 0, child.pid
    watched = {pid}
    while not child.ended.done():
        if look % _PIDS_LOOKS == 0:
            with suppress(OSError):  # no file descriptor is left to look with
                watched = {pid, *reaper.descendants(pid)}
        look += 1
        for one in sorted(watched):
            if process_state(one) != "T":
                continue
            reason = f"process {one} of {what} was stopped"
            if not mends or one == pid:
                return reason
            _log.warning("%s; it is killed", reason)
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        step = due()
        last, seen = seen, (step, cpu_time(pid)) if step <= time.monotonic() else None
        sleeping = sleeping + 1 if seen is not None and seen == last and _sleeps(pid) else 0
        if sleeping >= _SLEEPING_LOOKS:
            seconds = _SLEEPING_LOOKS * _PERIOD_S
            return f"{what}'s process ({pid}) hangs: asleep for {seconds:g} s amid its work"
        await child.wait(_PERIOD_S)
    return ""


def cpu_time(pid: int) -> int:
    """CPU time of a process with all its threads, in ticks of the kernel's."""
    fields = stat_fields(Path(f"/proc/{pid}/stat"))
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _sleeps(pid: int) -> bool:
    """Whether all threads sleep: none runs, waits for a CPU (R) or for a disk (D)."""
    with suppress(OSError):  # no file descriptor is left to look with
        states = [stat_fields(stat)[:1] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(state in (["S"], ["I"]) for state in states)
    return False
