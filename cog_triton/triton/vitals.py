"""Whether the processes of a running tritonserver are all alive, and none is stopped."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from typing_extensions import Self

from cog_triton import reaper

_SERVER = "tritonserver"
_STUB = "triton_python_backend_stub"
_LOOK_S = 0.25


class Vitals:
    """Watches the servers and stubs that run under one process; use as a context manager.

    Death is told by the kernel (pidfd_open(2)), a SIGSTOP is seen in proc(5) within 0.25 s. A
    process of another kind is left to whoever started it.
    """

    def __init__(self, root: int) -> None:
        """`root` is the process that all of them descend from; start when they are ready."""
        self._names = {
            pid: name for pid in reaper.descendants(root) if (name := _name(pid)) is not None
        }
        self._descriptors: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    async def trouble(self) -> str:
        """Wait until a process has died or was stopped; says which and what."""
        loop = asyncio.get_running_loop()
        died: asyncio.Future[int] = loop.create_future()

        def on_death(pid: int) -> None:
            if not died.done():
                died.set_result(pid)

        try:
            for pid in self._names:
                try:
                    self._descriptors[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    return self._died(pid)
                loop.add_reader(self._descriptors[pid], on_death, pid)
            while not (stopped := [pid for pid in self._names if _state(pid) == "T"]):
                await asyncio.wait({died}, timeout=_LOOK_S)
                if died.done():
                    return self._died(died.result())
            return f"{self._names[stopped[0]]} (process {stopped[0]}) was stopped"
        finally:
            for descriptor in self._descriptors.values():
                loop.remove_reader(descriptor)

    def _died(self, pid: int) -> str:
        return f"{self._names[pid]} (process {pid}) has died"


def _name(pid: int) -> str | None:
    """What a process is called in errors, None if it is neither a server nor a stub."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A program that is a script has its interpreter before it.
    for place, word in enumerate(words[:2]):
        program = Path(word).name
        if program == _SERVER:
            return _SERVER
        if program == _STUB:
            model = Path(words[place + 1]).parent.parent.name if len(words) > place + 1 else "?"
            return f"the stub of {model}"
    return None


def _state(pid: int) -> str:
    """The letter of proc(5): T is stopped. Blank when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
