"""CPU time and memory of each part of a server's process tree, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cog_triton.system import reaper
from cog_triton.system.process_state import stat_fields

_TICKS = os.sysconf("SC_CLK_TCK")
_MODULES = {
    "cog_triton.door": "door",  # the reverse proxy of 0.4.0
    "cog_triton.front.large_bodies": "large-bodies child",
    "cog_triton.backend.engine_process": "engine",
    "cog_triton.text.template_child": "template child",
    "cog_triton.front.server": "server",
    "cog_triton.serving.coglet" + ".http_server": "cog",
    "cog.server.http": "cog",
}


class Use(NamedTuple):
    """What a part used: seconds of CPU in its own code and in the kernel, and its wake-ups.

    A wake-up is a voluntary context switch of a thread that still runs.
    """

    user: float = 0.0
    system: float = 0.0
    wake_ups: int = 0


def uses(*roots: int) -> dict[str, Use]:
    """What `roots` and all below have used so far, by part; resolution 10 ms a process.

    Threads that have ended are included in the CPU, processes that have ended are not.
    """
    found: dict[str, Use] = {}
    for part, pid in tree(*roots):
        if not (fields := stat_fields(Path(f"/proc/{pid}/stat"))):
            continue
        threads = (thread.name for thread in Path(f"/proc/{pid}/task").glob("*"))
        woken = sum(_switches(_read(pid, f"task/{thread}/status")) for thread in threads)
        before = found.get(part, Use())
        found[part] = Use(
            before.user + int(fields[11]) / _TICKS,
            before.system + int(fields[12]) / _TICKS,
            before.wake_ups + woken,
        )
    return found


def cpu_seconds(*roots: int) -> dict[str, float]:
    """CPU seconds used so far by `roots` and all below, by part; see `uses`."""
    return {part: used.user + used.system for part, used in uses(*roots).items()}


def _switches(status: str) -> int:
    found = status.partition("\nvoluntary_ctxt_switches:")[2].split(maxsplit=1)
    return int(found[0]) if found else 0


def memory_bytes(*roots: int) -> dict[str, int]:
    """Memory in bytes of `roots` and all below, by part, without mapped files.

    What processes share counts once (PSS). Files are left out, as their pages are whose processes
    happen to run beside: one that ends elsewhere on the machine would be seen here.
    """
    held: dict[str, int] = {}
    for part, pid in tree(*roots):
        held[part] = held.get(part, 0) + own_bytes(_read(pid, "smaps_rollup"))
    return held


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds of each part between two calls of `cpu_seconds`."""
    return {part: used - before.get(part, 0.0) for part, used in after.items()}


def own_bytes(smaps: str) -> int:
    """Anonymous and shared memory of a /proc/PID/smaps_rollup; 0 of one whose process has gone."""
    lines = (line.split() for line in smaps.splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


def part_of(words: list[str]) -> str:
    """Part of a server: door, server, cog, worker, tritonserver, engine, a stub, or others."""
    program = Path(words[0]).name
    if program.endswith("_stub"):
        return f"stub {Path(words[1]).parent.parent.name}"
    if program == "tritonserver":
        return program
    if any(word.endswith("/reaper.py") for word in words):
        return "others"
    if module := next((word for word in words if word in _MODULES), None):
        return _MODULES[module]
    return "worker" if any("coglet" in word for word in words) else "others"


def role_of(words: list[str]) -> str:
    """As `part_of`, with a reaper by its command, and the parent of all as "serve"."""
    if "--" in words and any(word.endswith("/reaper.py") for word in words[: words.index("--")]):
        return f"reaper of {role_of(words[words.index('--') + 1 :])}"
    part = part_of(words)
    return "serve" if part == "others" and "serve" in " ".join(words[:4]) else part


def tree(*roots: int) -> Iterator[tuple[str, int]]:
    """Part and process id of `roots` and all below; see `part_of`."""
    for pid in {*roots, *(below for root in roots for below in reaper.descendants(root))}:
        if words := _read(pid, "cmdline"):
            yield part_of(words.split("\0")), pid


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace")
    except OSError:
        return ""
