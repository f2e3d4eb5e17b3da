"""Detached programs: they outlive the process that starts them, and still end as a whole.

Each has a reaper as its root, in a session of its own, which no terminal's Ctrl-C reaches. Below
another reaper of ours a program cannot be detached: it ends with that.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cog_triton.system import reaper

_POLL_S = 0.005
_started: list[subprocess.Popen[bytes]] = []


def start(command: Sequence[str], env: Mapping[str, str], log: Path, grace: float) -> int:
    """Start `command`, its output going to `log`; returns the process id of its root.

    At SIGTERM to the root it has `grace` seconds to end, before all that is left is killed.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-S", "-I", str(Path(reaper.__file__).resolve())),
                *(f"--grace={grace}", "--", *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=log.parent,
            start_new_session=True,
        )
    _started.append(process)  # whose end this process need not wait for
    return process.pid


class DetachedProgram:
    """Handle of a detached program, whoever has started it; dropping it changes nothing."""

    def __init__(self, root: int) -> None:
        """`root` is the process id that `start` returned; raises OSError when it has ended."""
        self.root = root
        self._descriptor = os.pidfd_open(root)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return not select.select([self._descriptor], [], [], 0)[0]

    def wait(self, seconds: float) -> bool:
        """Wait until all of it has ended, at most `seconds`; returns whether it has."""
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def terminate(self) -> None:
        """Ask it to end; what does not within its grace is killed."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    def kill(self, timeout: float = 10.0) -> None:
        """Kill all of it; raises a TimeoutError if a process survives SIGKILL for `timeout` s."""
        deadline = time.monotonic() + timeout
        while self.alive and (pids := reaper.descendants(self.root)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {sorted(pids)} survive SIGKILL for {timeout:g} s")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        self.wait(timeout)

    def close(self) -> None:
        """Give the handle up."""
        os.close(self._descriptor)
