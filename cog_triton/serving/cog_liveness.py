"""Liveness of Cog's processes: the parent that listens, and the worker that runs the predictor."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from cog_triton.errors import TritonUnavailable
from cog_triton.serving.cog_health import HealthClient, HealthLimits, HealthMonitor
from cog_triton.settings.engine import SupervisionSettings
from cog_triton.system.process_state import process_state, with_descendants

_ROLES = {
    b"\0cog_triton.door\0": "front door",
    b"\0cog_triton.serving.coglet.http_server\0": "parent",
    b"_run_worker": "worker",
}
"""Names of the processes, by a part of their command line, where a NUL ends each word."""
_REAPER = b"reaper.py"
_TELL_S = 2.0


class CogProcesses:
    """Cog's front door, parent and worker, and their reapers, from the process `root` on."""

    def __init__(self, root: int) -> None:
        self._root = root

    def stopped(self) -> str | None:
        """Describes a process that is stopped (SIGSTOP), None if none is.

        Of several Cogs, as in a rolling replacement, one may be stopped that does not serve: then
        only the front door counts, and health checks tell of the one that does.
        """
        roles = self._roles()
        several = list(roles.values()).count("parent") > 1
        for pid, role in roles.items():
            if process_state(pid) == "T" and not (several and not role.startswith("front door")):
                return f"Cog's {role} (process {pid}) was stopped"
        return None

    def kill(self, role: str) -> bool:
        """SIGKILL the worker or the parent, so that what is before it fails its requests.

        Returns whether there is one.
        """
        found = [pid for pid, has in self._roles().items() if has == role]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    def _roles(self) -> dict[int, str]:
        """By process id; that of a reaper is to be the reaper of the process that has a role."""
        found: dict[int, str] = {}
        for pid in with_descendants(self._root):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                for part, role in _ROLES.items():
                    if part in line:
                        found[pid] = f"{role}'s reaper" if _REAPER in line else role
        return found


class CogWatch:
    """Watchdog of a Cog that is ready and listens on `host` and `port`, below the process `root`.

    Whoever started Cog calls `check` every COG_PROBE_PERIOD seconds, on any thread.
    """

    def __init__(self, settings: SupervisionSettings, host: str, port: int, root: int) -> None:
        self._health = HealthClient(host, port, settings.cog_probe_timeout)
        self._processes = CogProcesses(root)
        self._monitor = HealthMonitor(time.monotonic(), HealthLimits.of(settings))

    @property
    def failure(self) -> TritonUnavailable | None:
        """Why requests fail now, while Triton is being restarted."""
        return self._monitor.failure

    def check(self) -> str | None:
        """Look once; returns the line to show if the state has changed. Blocks for one probe.

        When Cog is lost, running requests have been failed by its parent, or by the front door.

        Raises:
            TritonStartFailed: Triton was given up.
            TritonUnavailable: Cog is stopped, hangs, or is unhealthy for any other reason.
        """
        try:
            if stopped := self._processes.stopped():
                raise TritonUnavailable(f"{stopped}; stopping")
            return self._monitor.update(self._health.read(), time.monotonic())
        except TritonUnavailable:
            self._fail_requests()
            raise

    def give_up(self, reason: str) -> NoReturn:
        """Fail running requests, and raise E2105."""
        self._fail_requests()
        raise TritonUnavailable(f"{reason}; stopping")

    def _fail_requests(self) -> None:
        if self._processes.kill("worker" if self._health.parent_answers() else "parent"):
            time.sleep(_TELL_S)
