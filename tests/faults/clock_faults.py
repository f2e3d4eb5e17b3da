"""Wall clock of one server that can be set: a preloaded library, and a file that it reads."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_FILE, _PRELOAD = "FAULT_CLOCK", "LD_PRELOAD"
_LEAST_S, _MOST_S = 60, 40 * 86400


def lacking() -> str | None:
    """Why no clock can be set here; None if one can."""
    return None if shutil.which("cc") else "no C compiler (cc)"


def environment(directory: Path) -> dict[str, str]:
    """Build the library in `directory`; returns what a server needs to have its clock set."""
    library, file = directory / "clock.so", directory / "clock"
    command = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, str(_SOURCE), "-o", str(library), "-ldl"], check=True)
    _set(file, 0)
    return {_PRELOAD: str(library), _FILE: str(file)}


async def jump(server: Mapping[str, str], seconds: float, rng: random.Random) -> None:
    """Set the clock of a server with this environment ahead or back, and right after `seconds`."""
    file = Path(server[_FILE])
    _set(file, rng.choice((-1, 1)) * rng.randint(_LEAST_S, _MOST_S))
    try:
        await asyncio.sleep(seconds)
    finally:
        _set(file, 0)


def _set(file: Path, ahead: int) -> None:
    """Write in place, for the servers have it mapped."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, struct.pack("=q", ahead), 0)
    finally:
        os.close(descriptor)
