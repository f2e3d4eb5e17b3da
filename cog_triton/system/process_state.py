"""State of processes by proc(5): whether they are stopped, asleep, or gone."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from cog_triton.system import reaper

UNKNOWN = "?"


def stat_fields(stat: Path) -> list[str]:
    """Fields of a process's or thread's stat file from the state on; empty if it is gone.

    Only UNKNOWN while this process has no file descriptor to read it with.
    """
    try:
        return stat.read_text("utf-8", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return [UNKNOWN]
        raise


def process_state(pid: int) -> str:
    """State letter, e.g. T for stopped; blank if there is no such process."""
    return (stat_fields(Path(f"/proc/{pid}/stat")) or [""])[0]


def with_descendants(root: int) -> set[int]:
    """A process, mostly a reaper, and all that it started."""
    return {root, *reaper.descendants(root)}


def stopped(pids: Iterable[int]) -> int | None:
    """The first of these processes that is stopped (SIGSTOP)."""
    return next((pid for pid in sorted(pids) if process_state(pid) == "T"), None)
