"""Checkpoint calls with a time limit, made by a child process that is killed when it is over.

The child, ``python -m cog_triton.keeper.checkpoint_process``, checkpoints groups of processes; the
driver's calls can block for ever. An engine's processes are checkpointed all or none: with tensor
parallelism a rank that goes on waits for one that does not. So all are locked before the first is
moved, and all are back before the first is unlocked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar, cast

from cog_triton.errors import CogTritonError, EngineNotParked, EngineNotRestored
from cog_triton.ipc import child
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


T = TypeVar("T")

_START_S = 60.0
_CALL_S = 60.0  # the first one initializes the driver: seconds with eight GPUs


class CheckpointProcess:
    """Process that checkpoints and restores groups of processes; of one thread at a time.

    It stays, so that a restore does not wait for a start.
    """

    def __init__(self, timeout_s: float = _CALL_S) -> None:
        """Start it; no call may take longer than `timeout_s` (42 GB took 23 s).

        Raises E2110 if it does not start or the driver cannot checkpoint.
        """
        self._timeout_s = timeout_s
        self._child: child.PythonChild | None = None
        try:
            self.states(())
        except EngineNotParked:
            self.close()
            raise

    def states(self, pids: Iterable[int]) -> dict[int, ProcessState]:
        """CUDA's state of those processes that have CUDA; raises E2110."""
        found = self._call(states, list(pids))
        return {pid: ProcessState(state) for pid, state in found.items()}

    def checkpoint(self, pids: Sequence[int]) -> None:
        """Move the processes off the GPU; raises E2110, or E2111 if they must be ended."""
        self._call(checkpoint, pids)

    def restore(self, pids: Sequence[int]) -> None:
        """Move the processes back, where they run again; raises E2111 if they must be ended."""
        self._call(restore, pids)

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _call(self, function: Callable[[Sequence[int]], T], pids: Sequence[int]) -> T:
        what = function.__name__
        lost = EngineNotParked if function is states else EngineNotRestored
        try:
            if self._child is None or not self._child.alive:
                self.close()
                self._child = child.PythonChild(__name__, timeout=_START_S)
        except OSError as error:
            raise EngineNotParked(f"the process for the driver's calls: {error}") from error
        try:
            self._child.connection.settimeout(self._timeout_s)
            return cast(T, child.call(self._child, function, pids))
        except TimeoutError as error:
            self.close()  # in the driver, perhaps for ever
            raise lost(f"the driver has not done its {what} in {self._timeout_s:g} s") from error
        except OSError as error:
            self.close()
            raise lost(f"the process for the driver's calls ended in {what}") from error
        except RuntimeError as error:
            raise lost(str(error)) from error


if __name__ == "__main__":
    child.serve_calls(int(sys.argv[1]))
