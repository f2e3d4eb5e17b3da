"""Child process that checkpoints groups of processes; the driver's calls can block for ever.

Run as ``python -m cog_triton.keeper.checkpoint_child`` by `checkpoint_process`. An engine's
processes are checkpointed all or none: with tensor parallelism a rank that goes on waits for one
that does not. So all are locked before the first is moved, and all are back before the first is
unlocked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cog_triton.errors import CogTritonError, EngineNotParked, EngineNotRestored
from cog_triton.ipc import child
from cog_triton.keeper.cuda_checkpoint import CudaCheckpoint, ProcessState

DONE, FAILED = b"D", b"E"
LOCK_TIMEOUT_MS = 10_000
"""How long work that was given to the GPU may take to end; an engine that is parked has none."""


def cuda_processes(cuda: CudaCheckpoint, pids: Iterable[int]) -> dict[int, ProcessState]:
    """State of those processes that have CUDA."""
    found = ((pid, cuda.state(pid)) for pid in pids)
    return {pid: state for pid, state in found if state is not None}


def checkpoint_group(cuda: CudaCheckpoint, pids: Sequence[int]) -> None:
    """Lock all processes, then move all of their GPU memory to host memory.

    Raises:
        EngineNotParked: a process did not follow; all run as before.
        EngineNotRestored: nor could that be undone.
    """
    try:
        for pid in pids:  # one by one: the last is locked only if all others are
            cuda.lock(pid, LOCK_TIMEOUT_MS)
        _on_all(cuda.checkpoint, pids)
    except CogTritonError as error:
        try:
            restore_group(cuda, pids)
        except EngineNotRestored as lost:
            raise EngineNotRestored(f"{error.detail}; then {lost.detail}") from error
        raise EngineNotParked(error.detail) from error


def restore_group(cuda: CudaCheckpoint, pids: Sequence[int]) -> None:
    """Move all memory back to the GPU, then unlock all, from whatever state each is in.

    Raises EngineNotRestored where one does not run afterwards.
    """
    try:
        states = cuda_processes(cuda, pids)
        _on_all(cuda.restore, [p for p in pids if states.get(p) is ProcessState.CHECKPOINTED])
        states = cuda_processes(cuda, pids)
        _on_all(cuda.unlock, [p for p in pids if states.get(p) is ProcessState.LOCKED])
        states = cuda_processes(cuda, pids)
    except CogTritonError as error:
        raise EngineNotRestored(error.detail) from error
    if wrong := [pid for pid in pids if states.get(pid) is not ProcessState.RUNNING]:
        told = ", ".join(f"{pid}: {states[pid].name if pid in states else 'gone'}" for pid in wrong)
        raise EngineNotRestored(f"processes do not run with CUDA any more ({told})")


def _on_all(call: Callable[[int], None], pids: Sequence[int]) -> None:
    """Make one call for each process, all at once; raises the first error once all have ended."""
    if not pids:
        return
    with ThreadPoolExecutor(len(pids)) as pool:
        for done in [pool.submit(partial(call, pid)) for pid in pids]:
            if (error := done.exception()) is not None:
                raise error


def _answer(request: memoryview, cuda: CudaCheckpoint | CogTritonError) -> tuple[bytes, bytes]:
    call, pids = json.loads(bytes(request))
    calls: dict[str, Callable[[CudaCheckpoint, Sequence[int]], object]] = {
        "states": cuda_processes,
        "checkpoint": checkpoint_group,
        "restore": restore_group,
    }
    try:
        if isinstance(cuda, CogTritonError):
            raise cuda
        return DONE, json.dumps(calls[call](cuda, pids)).encode()
    except CogTritonError as error:
        return FAILED, str(error).encode()


def main() -> None:
    """Answer requests until the parent hangs up; its first argument is the descriptor."""
    cuda: CudaCheckpoint | CogTritonError
    try:
        cuda = CudaCheckpoint()
    except CogTritonError as error:
        cuda = error
    child.serve(int(sys.argv[1]), lambda request: _answer(request, cuda))


if __name__ == "__main__":
    main()
