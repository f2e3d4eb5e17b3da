"""Liveness of tritonserver's processes: detects that one died or was stopped."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from cog_triton.system import reaper
from cog_triton.system.process_state import process_state, stopped, with_descendants

_SERVER = "tritonserver"
_STUB = "triton_python_backend_stub"
_POLL_S = 0.25
_DEAD = ("", "Z", "X")
_RESCAN_LOOKS = 8
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.M)


class ProcessLiveness:
    """Liveness watch over a reaper and all its descendants, one wait at a time.

    The kernel reports the death of a server or stub (pidfd_open(2)); that of other processes is
    ignored. A SIGSTOP is seen in proc(5) within 0.25 s.
    """

    def __init__(self, root: int) -> None:
        """`root` is the reaper; create this when all of them run."""
        self._pids = with_descendants(root)
        self._names = _named(self._pids)

    async def wait_for_failure(self) -> str:
        """Wait until a process has died, be it before, or was stopped; describes which and what."""
        loop = asyncio.get_running_loop()
        descriptors: list[int] = []
        died = asyncio.Event()
        try:
            for pid in self._names:
                try:
                    descriptors.append(os.pidfd_open(pid))
                except ProcessLookupError:
                    died.set()
                else:
                    loop.add_reader(descriptors[-1], died.set)
            while True:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(died.wait(), _POLL_S)
                states = {pid: process_state(pid) for pid in self._pids}
                # A dying server takes its stubs along, so it is named first.
                for pid in sorted(self._names, key=lambda pid: self._names[pid] != _SERVER):
                    if states[pid] in _DEAD:
                        return f"{_described(pid, self._names)} has died"
                for pid, state in states.items():
                    if state == "T":
                        return f"{_described(pid, self._names)} was stopped"
                if died.is_set():  # and could not be looked at
                    await asyncio.sleep(_POLL_S)
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
                os.close(descriptor)


async def wait_until_stopped(root: int) -> str:
    """Wait until the reaper `root`, or a process below it, was stopped; says which."""
    looks, pids = 0, {root}
    while True:
        if looks % _RESCAN_LOOKS == 0:
            with suppress(OSError):  # no file descriptor is left to look with
                pids = with_descendants(root)
        looks += 1
        if (pid := stopped(pids)) is not None:
            return f"{_described(pid, _named([pid]))} was stopped"
        await asyncio.sleep(_POLL_S)


def _described(pid: int, names: Mapping[int, str]) -> str:
    return f"{names.get(pid, 'a process of Triton')} (process {pid})"


def named_processes(root: int) -> dict[int, str]:
    """Every tritonserver and stub below the process `root`: its name for errors, by its id."""
    return _named(reaper.descendants(root))


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs, in bytes; 0 if there is no such process."""
    try:
        found = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_text("utf-8", "replace"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) << 10 if found else 0


def _named(pids: Iterable[int]) -> dict[int, str]:
    return {pid: name for pid in pids if (name := _name(pid)) is not None}


def _name(pid: int) -> str | None:
    """Name of a process for errors, None if it is neither a server nor a stub."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A script has its interpreter as the first word.
    for place, word in enumerate(words[:2]):
        program = Path(word).name
        if program == _SERVER:
            return _SERVER
        if program == _STUB:
            model = Path(words[place + 1]).parent.parent.name if len(words) > place + 1 else "?"
            return f"the stub of {model}"
    return None
