"""Checkpoint calls with a time limit, made by a child process that is killed when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

import cog_triton.keeper.checkpoint_child as child
from cog_triton.errors import EngineNotParked, EngineNotRestored
from cog_triton.ipc import calls
from cog_triton.ipc.child import PythonChild
from cog_triton.keeper.cuda_checkpoint import ProcessState

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
        self._child: PythonChild | None = None
        try:
            self.states(())
        except EngineNotParked:
            self.close()
            raise

    def states(self, pids: Iterable[int]) -> dict[int, ProcessState]:
        """CUDA's state of those processes that have CUDA; raises E2110."""
        found = self._call(child.states, list(pids))
        return {pid: ProcessState(state) for pid, state in found.items()}

    def checkpoint(self, pids: Sequence[int]) -> None:
        """Move the processes off the GPU; raises E2110, or E2111 if they must be ended."""
        self._call(child.checkpoint, pids)

    def restore(self, pids: Sequence[int]) -> None:
        """Move the processes back, where they run again; raises E2111 if they must be ended."""
        self._call(child.restore, pids)

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, function: Callable[[Sequence[int]], T], pids: Sequence[int]) -> T:
        what = function.__name__
        lost = EngineNotParked if function is child.states else EngineNotRestored
        try:
            if self._child is None or not self._child.alive:
                self.close()
                self._child = PythonChild(child.__name__, timeout=_START_S)
        except OSError as error:
            raise EngineNotParked(f"the process for the driver's calls: {error}") from error
        try:
            self._child.connection.settimeout(self._timeout_s)
            return cast(T, calls.call(self._child, function, pids))
        except TimeoutError as error:
            self.close()  # in the driver, perhaps for ever
            raise lost(f"the driver has not done its {what} in {self._timeout_s:g} s") from error
        except OSError as error:
            self.close()
            raise lost(f"the process for the driver's calls ended in {what}") from error
        except RuntimeError as error:
            raise lost(str(error)) from error
