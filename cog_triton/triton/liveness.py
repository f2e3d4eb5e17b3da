"""Liveness of tritonserver's processes: detects that one has died."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cog_triton.system import reaper
from cog_triton.system.process_state import process_state

_SERVER = "tritonserver"
_STUB = "triton_python_backend_stub"
_POLL_S = 0.25
_DEAD = ("", "Z", "X")
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.M)


async def wait_for_death(processes: Mapping[int, str]) -> str:
    """Wait until one of these processes has died, be it before; describes which, by its name.

    The parent watches for a SIGSTOP.
    """
    loop = asyncio.get_running_loop()
    descriptors: list[int] = []
    died = asyncio.Event()
    try:
        for pid in processes:
            try:
                descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                died.set()
            else:
                loop.add_reader(descriptors[-1], died.set)
        while True:
            await died.wait()
            # A dying server takes its stubs along, so it is named first.
            for pid in sorted(processes, key=lambda pid: processes[pid] != _SERVER):
                if process_state(pid) in _DEAD:
                    return f"{processes[pid]} (process {pid}) has died"
            await asyncio.sleep(_POLL_S)  # it could not be looked at
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def named_processes(root: int) -> dict[int, str]:
    """Every tritonserver and stub below the process `root`: its name for errors, by its id."""
    return {pid: name for pid in reaper.descendants(root) if (name := _name(pid)) is not None}


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs, in bytes; 0 if there is no such process."""
    try:
        found = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_text("utf-8", "replace"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) << 10 if found else 0


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
