"""Child process that checkpoints groups of processes; the driver's calls can block for ever.

Run as ``python -m cog_triton.keeper.checkpoint_child`` by `checkpoint_process`. An engine's
processes are checkpointed all or none: with tensor parallelism a rank that goes on waits for one
that does not. So all are locked before the first is moved, and all are back before the first is
unlocked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from cog_triton.errors import CogTritonError, EngineNotParked, EngineNotRestored
from cog_triton.ipc import calls
from cog_triton.keeper.cuda_checkpoint import CudaCheckpoint, ProcessState

LOCK_TIMEOUT_MS = 10_000
"""How long work that was given to the GPU may take to end; an engine that is parked has none."""


def states(pids: Sequence[int]) -> Mapping[int, ProcessState]:
    """State of those processes that have CUDA; raises E2110 where the driver cannot checkpoint."""
    driver = _driver()
    found = ((pid, driver.state(pid)) for pid in pids)
    return {pid: state for pid, state in found if state is not None}


def checkpoint(pids: Sequence[int]) -> None:
    """Lock all processes, then move all of their GPU memory to host memory.

    Raises:
        EngineNotParked: a process did not follow; all run as before.
        EngineNotRestored: nor could that be undone.
    """
    try:
        for pid in pids:  # one by one: the last is locked only if all others are
            _driver().lock(pid, LOCK_TIMEOUT_MS)
        _on_all(_driver().checkpoint, pids)
    except CogTritonError as error:
        try:
            restore(pids)
        except EngineNotRestored as lost:
            raise EngineNotRestored(f"{error.detail}; then {lost.detail}") from error
        raise EngineNotParked(error.detail) from error


def restore(pids: Sequence[int]) -> None:
    """Move all memory back to the GPU, then unlock all, from whatever state each is in.

    Raises EngineNotRestored where one does not run afterwards.
    """
    try:
        found = states(pids)
        _on_all(_driver().restore, [p for p in pids if found.get(p) is ProcessState.CHECKPOINTED])
        found = states(pids)
        _on_all(_driver().unlock, [p for p in pids if found.get(p) is ProcessState.LOCKED])
        found = states(pids)
    except CogTritonError as error:
        raise EngineNotRestored(error.detail) from error
    if wrong := [pid for pid in pids if found.get(pid) is not ProcessState.RUNNING]:
        told = ", ".join(f"{pid}: {found[pid].name if pid in found else 'gone'}" for pid in wrong)
        raise EngineNotRestored(f"processes do not run with CUDA any more ({told})")


def _on_all(call: Callable[[int], None], pids: Sequence[int]) -> None:
    """Make one call for each process, all at once; raises the first error once all have ended."""
    if not pids:
        return
    with ThreadPoolExecutor(len(pids)) as pool:
        for done in [pool.submit(partial(call, pid)) for pid in pids]:
            if (error := done.exception()) is not None:
                raise error


@cache
def _driver() -> CudaCheckpoint:
    return CudaCheckpoint()


if __name__ == "__main__":
    calls.serve(int(sys.argv[1]))
