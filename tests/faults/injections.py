"""Fault injections: one function a kind, on the real processes and files of one server.

Each returns when the fault is over and undone; what it has broken is for the server to mend.
"""

from __future__ import annotations

import asyncio
import random
import resource
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from faults import cgroups, clock_faults, disk_faults, memory_faults, processes, sandbox
from faults.target import Target

_POLL_S, _VICTIM_S = 0.02, 30.0
_LEAST_DESCRIPTORS = 16
"""As many, at least, so that poll(2) works, which refuses to look at more than are allowed."""


class NoVictim(RuntimeError):
    """No process of the role that a scenario names."""


async def _victim(target: Target, role: str, rng: random.Random) -> int:
    for _ in range(round(_VICTIM_S / _POLL_S)):
        if (pid := processes.victim(target.pid, role, rng)) is not None:
            return pid
        await asyncio.sleep(_POLL_S)
    raise NoVictim(f"no process is a {role!r}; there are {sorted(processes.by_role(target.pid))}")


async def kill(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """SIGKILL, as the kernel's OOM killer or an operator sends it."""
    processes.send(await _victim(target, role, rng), signal.SIGKILL)


async def segfault(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """SIGSEGV: a fault in native code."""
    processes.send(await _victim(target, role, rng), signal.SIGSEGV)


async def stop(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """SIGSTOP for some seconds, unless the server kills the process before."""
    pid = await _victim(target, role, rng)
    processes.send(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(lasts)
    finally:
        processes.send(pid, signal.SIGCONT)


async def suspend(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """All processes stand still while the clocks go on, as on a machine that was suspended."""
    assert target.box.group is not None
    cgroups.freeze(target.box.group, True)
    try:
        await asyncio.sleep(lasts)
    finally:
        cgroups.freeze(target.box.group, False)


async def clock_jump(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """The wall clock jumps by minutes to weeks, either way, and back after some seconds."""
    await clock_faults.jump(target.environment, lasts, rng)


async def no_descriptors(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """EMFILE: the process may open nothing more for some seconds (prlimit)."""
    pid = await _victim(target, role, rng)
    with suppress(ProcessLookupError):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        limit = max(_LEAST_DESCRIPTORS, processes.lowest_free_descriptor(pid))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
        try:
            await asyncio.sleep(lasts)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


async def full_disk(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """The work directory's disk is full when a process dies, and for some seconds from then."""
    with disk_faults.filled(target.inside(target.box.work_dir)):
        await _killed_meanwhile(target, role, lasts, rng)


async def full_shared_memory(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """/dev/shm is full when a process dies, and for some seconds from then."""
    with disk_faults.filled(target.inside(disk_faults.SHM)):
        await _killed_meanwhile(target, role, lasts, rng)


async def slow_disk(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """The work directory's disk writes at one moment in ten, when a process dies and after."""
    stalls = asyncio.create_task(disk_faults.stalling(target.inside(target.box.work_dir), lasts))
    try:
        await _killed_meanwhile(target, role, lasts, rng)
    finally:
        await stalls


async def out_of_memory(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    """The kernel's OOM killer ends the process, in a control group that is out of memory."""
    await memory_faults.oom_kill(await _victim(target, role, rng))


async def _killed_meanwhile(target: Target, role: str, lasts: float, rng: random.Random) -> None:
    await asyncio.sleep(lasts / 4)
    if role != NOBODY:
        await kill(target, role, lasts, rng)
    await asyncio.sleep(lasts * 3 / 4)


def _needs_group() -> str | None:
    return cgroups.lacking("cgroup.freeze")


NOBODY = "nobody"
"""The victim of a fault that no process dies of."""


@dataclass(frozen=True, slots=True)
class Injection:
    """How a kind of fault is done, and why it cannot be here, None if it can."""

    inject: Callable[[Target, str, float, random.Random], Awaitable[None]]
    lacking: Callable[[], str | None] = lambda: None


INJECTIONS = {
    "kill": Injection(kill),
    "segfault": Injection(segfault),
    "stop": Injection(stop),
    "suspend": Injection(suspend, _needs_group),
    "clock jump": Injection(clock_jump, clock_faults.lacking),
    "no descriptors": Injection(no_descriptors),
    "full disk": Injection(full_disk, sandbox.lacking),
    "full shared memory": Injection(full_shared_memory, sandbox.lacking),
    "slow disk": Injection(slow_disk, sandbox.lacking),
    "out of memory": Injection(out_of_memory, memory_faults.lacking),
}
"""Kinds of faults by the name that scenarios give them."""
