"""Strikes: a function for each kind of fault, on the real processes and files of one server.

Each returns when the fault is over and undone; what it has broken is for the server to mend.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cog_triton.system.process_state import process_state
from faults import processes, sandbox
from faults.target import Target

_POLL_S, _VICTIM_S, _DEATH_S = 0.02, 30.0, 20.0
_LEAST_DESCRIPTORS = 16
"""As many, at least, so that poll(2) works, which refuses to look at more than are allowed."""
NOBODY = "nobody"
"""The victim of a fault that no process dies of."""
DRAIN_S = 60
_EXIT_S = 30.0


class NoVictim(RuntimeError):
    """No process of the role that a scenario names."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault: its kind (of STRIKES), the role that it hits, and how many seconds it lasts."""

    fault: str
    victim: str = NOBODY
    lasts: float = 0.0
    seed: int = 0

    async def inject(self, target: Target) -> None:
        """Do it; raises NoVictim."""
        await STRIKES[self.fault].inject(target, self, random.Random(self.seed))


async def _victim(target: Target, strike: Strike, rng: random.Random) -> int:
    for _ in range(round(_VICTIM_S / _POLL_S)):
        if (pid := processes.victim(target.pid, strike.victim, rng)) is not None:
            return pid
        await asyncio.sleep(_POLL_S)
    there = sorted(processes.by_role(target.pid))
    raise NoVictim(f"no process is a {strike.victim!r}; there are {there}")


async def kill(target: Target, strike: Strike, rng: random.Random) -> None:
    """SIGKILL, as the kernel's OOM killer or an operator sends it."""
    processes.send(await _victim(target, strike, rng), signal.SIGKILL)


async def segfault(target: Target, strike: Strike, rng: random.Random) -> None:
    """SIGSEGV: a fault in native code."""
    processes.send(await _victim(target, strike, rng), signal.SIGSEGV)


async def stop(target: Target, strike: Strike, rng: random.Random) -> None:
    """SIGSTOP for some seconds, unless the server kills the process before."""
    pid = await _victim(target, strike, rng)
    processes.send(pid, signal.SIGSTOP)
    over = time.monotonic() + strike.lasts
    try:
        while time.monotonic() < over and process_state(pid) not in ("", "Z", "X"):
            await asyncio.sleep(_POLL_S)
    finally:
        processes.send(pid, signal.SIGCONT)


async def suspend(target: Target, strike: Strike, rng: random.Random) -> None:
    """All processes stand still while the clocks continue, as on a machine that was suspended."""
    assert target.box.group is not None
    frozen = target.box.group / "cgroup.freeze"
    frozen.write_text("1")
    try:
        await asyncio.sleep(strike.lasts)
    finally:
        frozen.write_text("0")


async def no_descriptors(target: Target, strike: Strike, rng: random.Random) -> None:
    """EMFILE: the process may open nothing more for some seconds (prlimit)."""
    pid = await _victim(target, strike, rng)
    with suppress(ProcessLookupError):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        limit = max(_LEAST_DESCRIPTORS, processes.lowest_free_descriptor(pid))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
        try:
            await asyncio.sleep(strike.lasts)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


# The server's own mounts, of which those of the machine know nothing.


async def full_disk(target: Target, strike: Strike, rng: random.Random) -> None:
    """The work directory's disk is full when a process dies, and for some seconds from then."""
    with _filled(target.inside(target.box.work_dir)):
        await _killed_meanwhile(target, strike, rng)


async def full_shared_memory(target: Target, strike: Strike, rng: random.Random) -> None:
    """/dev/shm is full when a process dies, and for some seconds from then."""
    with _filled(target.inside(Path("/dev/shm"))):
        await _killed_meanwhile(target, strike, rng)


async def slow_disk(target: Target, strike: Strike, rng: random.Random) -> None:
    """The work directory's disk writes at one moment in ten, when a process dies and after."""
    stalls = asyncio.create_task(_stalling(target.inside(target.box.work_dir), strike.lasts))
    try:
        await _killed_meanwhile(target, strike, rng)
    finally:
        await stalls


async def _killed_meanwhile(target: Target, strike: Strike, rng: random.Random) -> None:
    await asyncio.sleep(strike.lasts / 4)
    if strike.victim != NOBODY:
        await kill(target, strike, rng)
    await asyncio.sleep(strike.lasts * 3 / 4)


@contextmanager
def _filled(directory: Path) -> Iterator[None]:
    """The file system of `directory` has no byte left within the block."""
    place, ballast = os.open(directory, os.O_RDONLY), "fault-ballast"
    try:
        file = os.open(ballast, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=place)
        size, block = 0, 64 << 20
        while block >= 1 << 12:
            try:
                os.posix_fallocate(file, size, block)
                size += block
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block //= 2
        os.close(file)
        yield
    finally:
        os.unlink(ballast, dir_fd=place)
        os.close(place)


_FREEZE, _THAW = 0xC0045877, 0xC0045878
"""FIFREEZE and FITHAW of linux/fs.h: writers wait in the kernel until the file system thaws."""


async def _stalling(directory: Path, seconds: float) -> None:
    """For some seconds no write to the file system of `directory` ends but at moments."""
    place, until = os.open(directory, os.O_RDONLY), time.monotonic() + seconds
    try:
        while (left := until - time.monotonic()) > 0:
            await asyncio.to_thread(fcntl.ioctl, place, _FREEZE, 0)
            try:
                await asyncio.sleep(min(0.9, left))
            finally:
                fcntl.ioctl(place, _THAW, 0)
            await asyncio.sleep(0.1)
    finally:
        os.close(place)


_LIMITS = ("memory.max", "memory.limit_in_bytes")
_LIMIT, _BALLAST = 16 << 20, 64 << 20
# Is exempt from the OOM killer, joins the group, and asks for more than the group may have.
_GREEDY = f"""
import os, sys
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
held = b"x" * {_BALLAST}
os.read(0, 1)
"""


async def out_of_memory(target: Target, strike: Strike, rng: random.Random) -> None:
    """The kernel's OOM killer ends the process, in a control group that is out of memory."""
    await oom_kill(await _victim(target, strike, rng))


async def oom_kill(pid: int) -> None:
    """Have the OOM killer end process `pid`; raises RuntimeError if it lives."""
    with sandbox.group(f"memory-{pid}", *_LIMITS) as path:
        limit = next(path / name for name in _LIMITS if (path / name).exists())
        limit.write_text(str(_LIMIT))
        (path / "cgroup.procs").write_text(str(pid))
        greedy = await _ask_for_memory(path)
        try:
            for _ in range(round(_DEATH_S / _POLL_S)):
                if process_state(pid) in ("", "Z", "X"):
                    return
                if greedy.returncode is not None:
                    greedy = await _ask_for_memory(path)
                await asyncio.sleep(_POLL_S)
            raise RuntimeError(f"process {pid} lives in a group without memory")
        finally:
            with suppress(ProcessLookupError):  # it ends by itself when it gets no memory
                greedy.kill()
            await greedy.wait()


async def _ask_for_memory(group: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _GREEDY, str(group)), stdin=asyncio.subprocess.PIPE
    )


_LEAST_JUMP_S, _MOST_JUMP_S = 60, 40 * 86400


async def clock_jump(target: Target, strike: Strike, rng: random.Random) -> None:
    """The wall clock jumps by minutes to weeks, either way, and back after some seconds."""
    file = Path(target.environment["FAULT_CLOCK"])
    _set_clock(file, rng.choice((-1, 1)) * rng.randint(_LEAST_JUMP_S, _MOST_JUMP_S))
    try:
        await asyncio.sleep(strike.lasts)
    finally:
        _set_clock(file, 0)


def own_clock(directory: Path) -> dict[str, str]:
    """Build clock.c in `directory`; returns what a server needs to have its clock set."""
    library, file = directory / "clock.so", directory / "clock"
    command = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
    source = Path(__file__).with_name("clock.c")
    subprocess.run([*command, source, "-o", library, "-ldl"], check=True)
    _set_clock(file, 0)
    return {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(file)}


def _set_clock(file: Path, ahead: int) -> None:
    """Write in place, for the servers have it mapped."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, struct.pack("=q", ahead), 0)
    finally:
        os.close(descriptor)


async def drain(
    target: Target,
    strike: Strike,
    rng: random.Random,
    numbers: Sequence[signal.Signals] = (signal.SIGTERM,),
) -> None:
    """Tell the server to stop, and half a second later kill the victim; wait for its end.

    It ends what runs within DRAIN_S, after a second signal at once.
    """
    for number in numbers:
        processes.send(target.pid, number)
        await asyncio.sleep(0.5)
    if strike.victim != NOBODY:
        await kill(target, strike, rng)
    deadline = time.monotonic() + (12 if numbers[1:] else DRAIN_S + _EXIT_S)
    while not target.has_ended and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a kind of fault is done, and why it cannot be here, None if it can.

    `ends` is whether the server has to end of it.
    """

    inject: Callable[[Target, Strike, random.Random], Awaitable[None]]
    lacking: Callable[[], str | None] = lambda: None
    ends: bool = False


def _no_compiler() -> str | None:
    return None if shutil.which("cc") else "no C compiler (cc)"


def _no_memory_group() -> str | None:
    return "not root" if os.geteuid() != 0 else sandbox.no_group(*_LIMITS)


STRIKES = {
    "kill": Kind(kill),
    "segfault": Kind(segfault),
    "stop": Kind(stop),
    "suspend": Kind(suspend, lambda: sandbox.no_group("cgroup.freeze")),
    "clock jump": Kind(clock_jump, _no_compiler),
    "no descriptors": Kind(no_descriptors),
    "full disk": Kind(full_disk, sandbox.no_mounts),
    "full shared memory": Kind(full_shared_memory, sandbox.no_mounts),
    "slow disk": Kind(slow_disk, sandbox.no_mounts),
    "out of memory": Kind(out_of_memory, _no_memory_group),
    "drain": Kind(drain, ends=True),
    "interrupt": Kind(partial(drain, numbers=(signal.SIGINT,)), ends=True),
    "second signal": Kind(partial(drain, numbers=(signal.SIGTERM, signal.SIGTERM)), ends=True),
}
"""Kinds of faults by the name that scenarios give them."""
