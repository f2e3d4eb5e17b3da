"""Liveness of Cog's processes: the parent that listens, and the worker that runs the predictor."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from cog_triton.system import reaper
from cog_triton.triton.liveness import process_state

_ROLES = {"cog_triton.serving.coglet.http_server": "parent", "_run_worker": "worker"}
"""Names of the processes, by a part of their command line."""


class CogProcesses:
    """Cog's parent and worker among the descendants of the process `root`, its reaper."""

    def __init__(self, root: int) -> None:
        self._root = root

    def stopped(self) -> str | None:
        """Describes a process that is stopped (SIGSTOP), None if neither is."""
        for pid, role in self._roles().items():
            if process_state(pid) == "T":
                return f"Cog's {role} (process {pid}) was stopped"
        return None

    def kill_worker(self) -> bool:
        """SIGKILL the worker, so that the parent fails its requests; whether there is one."""
        workers = [pid for pid, role in self._roles().items() if role == "worker"]
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(workers)

    def _roles(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for pid in reaper.descendants(self._root):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
                for part, role in _ROLES.items():
                    if part in line:
                        found[pid] = role
        return found
