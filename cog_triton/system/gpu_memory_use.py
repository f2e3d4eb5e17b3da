"""GPU memory by nvidia-smi: what processes hold of each GPU, and what is free there."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
_TIMEOUT_S = 30
_DEVICE = re.compile(r"/dev/nvidia\d+")


@dataclass(frozen=True, slots=True)
class GPUMemoryUse:
    """Memory of one GPU in bytes: `taken` by the processes asked for, `free` to all.

    `index` is the driver's number of the GPU.
    """

    index: str
    taken: int
    free: int


def gpu_memory_use(pids: Iterable[int]) -> list[GPUMemoryUse]:
    """GPU memory of these processes, a row for each GPU that they hold some of.

    In a container the driver cannot tell whose it is; where they have GPUs open, all that is taken
    counts as theirs then. Empty without GPUs, and where nvidia-smi does not run.
    """
    ours = {*pids}
    taken: dict[str, int] = {}
    for uuid, pid, used in _query("compute-apps=gpu_uuid,pid,used_memory"):
        if pid.isdecimal() and int(pid) in ours and used.isdecimal():
            taken[uuid] = taken.get(uuid, 0) + int(used)
    if not taken and not any(_opens_gpu(pid) for pid in ours):
        return []
    return [
        GPUMemoryUse(index, (taken[uuid] if taken else int(used)) * _MIB, int(free) * _MIB)
        for uuid, index, used, free in _query("gpu=uuid,index,memory.used,memory.free")
        if (not taken or uuid in taken) and used.isdecimal() and free.isdecimal()
    ]


def _opens_gpu(pid: int) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # it has been closed
            if _DEVICE.fullmatch(str(descriptor.readlink())):
                return True
    return False


def _query(what: str) -> list[list[str]]:
    """Rows of a query of nvidia-smi; memory is in MiB, and not a number where it is not known."""
    command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
