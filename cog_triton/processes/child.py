"""Child process of ours: it, and all that it starts, ends with us, and can be ended at once.

`watch` notices one that was stopped, or hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from cog_triton.system import reaper
from cog_triton.system.process_state import process_state, stat_fields

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 0.005
_MARKS = ("COG_TRITON_CHILD_", "COG_TRITON_REAPED_")
# A process hangs whose next step is overdue while all its threads sleep and use no CPU, look after
# look. A step that computes, or waits for a disk or a busy CPU, is none, however long it takes:
# prompts of 100,000 tokens take minutes on a CPU.
_PERIOD_S = 0.5
_SLEEPING_LOOKS = 4
_PIDS_LOOKS = 4
_own: set[int] = set()
_log = logging.getLogger(__name__)


class Child:
    """A process in a session of its own; a variable marks it and all that it starts.

    The kernel kills it when the thread that makes it ends, unless `own_end`: it notices itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: Path | None = None,
        output: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        own_end: bool = False,
    ) -> None:
        """Start it; raises OSError."""
        self._mark = f"{_MARKS[0]}{os.urandom(8).hex()}"
        parent = os.getpid()

        def in_child() -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process
            if not own_end:
                _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
                if os.getppid() != parent:
                    os._exit(1)

        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            # The marks of a sibling, and of who has started us, are for others to kill.
            env={
                **{k: v for k, v in environment.items() if not k.startswith(_MARKS)},
                self._mark: "1",
            },
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=in_child,
        )
        self.pid = self.process.pid
        _own.add(self.pid)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, or 128 and the number of the signal that ended it."""
        self._descriptor = os.pidfd_open(self.pid)
        self._loop.add_reader(self._descriptor, self._on_end)

    @property
    def pids(self) -> set[int]:
        """Itself and all that it started, without zombies."""
        own = set() if self.ended.done() else {self.pid, *reaper.descendants(self.pid)}
        return own | reaper.marked(self._mark)

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def wait(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        return bool((await asyncio.wait({self.ended}, timeout=seconds))[0])

    async def kill(self, seconds: float = 10.0) -> int:
        """Kill what is left of it and of all that it started; its exit code.

        Raises a TimeoutError if a process survives, and OSError if /proc cannot be read.
        """
        deadline = time.monotonic() + seconds
        while pids := self.pids:
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {sorted(pids)} survive SIGKILL for {seconds:g} s")
            for pid in sorted(pids):  # a parent first, which would start its children again
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_LOOK_S)
        return await self.ended

    def _on_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        code = self.process.wait()
        _own.discard(self.pid)
        if not self.ended.done():
            self.ended.set_result(code if code >= 0 else 128 - code)


def described(code: int) -> str:
    """How a process has ended, by its exit code, or 128 and the number of a signal."""
    if code > 128 and code - 128 in {number.value for number in signal.Signals}:
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with {code}"


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it (PR_SET_CHILD_SUBREAPER).

    Call `reap_orphans` now and then.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def reap_orphans() -> None:
    """Take the exit codes of orphans that have ended."""
    with suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in _own:  # the next time, once its `Child` has taken its own
                return
            os.waitpid(found.si_pid, 0)


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
