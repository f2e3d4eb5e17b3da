"""Processes of a server by role, whoever started them, and what they hold."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from _resource_usage import role_of

from cog_triton.system import reaper

STUBS = "stub"
"""A victim's name that stands for any stub of Triton's Python backend."""
TEMPLATE_CHILDREN = 2
"""Children of `cog_triton.text.chat_template` at most."""


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that a server holds: numbers of processes, files of shared memory, and so on."""

    processes: int
    shared_memory: int
    ports: int
    descriptors: int

    def beyond(self, other: Held, spare: Held) -> Held:
        """What exceeds `other` by more than `spare`; 0 where nothing does."""
        rows = zip(astuple(self), astuple(other), astuple(spare), strict=True)
        return Held(*(max(0, mine - its - free) for mine, its, free in rows))


def by_role(root: int) -> dict[str, list[int]]:
    """Process ids below `root` by role: see `_resource_usage.role_of`."""
    found: dict[str, list[int]] = {}
    for pid in sorted(reaper.descendants(root)):
        if words := [word for word in _read(pid, "cmdline").decode().split("\0") if word]:
            found.setdefault(role_of(words), []).append(pid)
    return found


def victim(root: int, role: str, rng: random.Random) -> int | None:
    """Process id of the role, None while there is none."""
    roles = by_role(root)
    if role == STUBS:
        stubs = [pid for name, pids in roles.items() if name.startswith("stub ") for pid in pids]
        return rng.choice(stubs) if stubs else None
    return rng.choice(roles[role]) if role in roles else None


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def lowest_free_descriptor(pid: int) -> int:
    """The number that the process's next descriptor would have."""
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in itertools.count() if number not in used)


def held(root: int, shared_memory: int) -> Held:
    """What the process tree of `root` holds; `shared_memory` is the number of its files there.

    The children that render chat templates are left out up to the pool's size: a second one is
    started whenever the first is slow, and kept.
    """
    pids = {root, *reaper.descendants(root)}
    pids -= {*by_role(root).get("template child", ())[:TEMPLATE_CHILDREN]}
    links = [link for pid in pids for link in _descriptors(pid)]
    listening = {
        f"socket:[{line.split()[9]}]"
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
        if line.split()[3] == "0A"
    }
    return Held(len(pids), shared_memory, len(listening & set(links)), len(links))


def shared_files(directory: int) -> int:
    """Number of files that servers have in the /dev/shm that is open as descriptor `directory`."""
    return sum(name.startswith("cog_triton") for name in os.listdir(directory))


def _descriptors(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield str(entry.readlink())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
