"""Checkpoint calls with a time limit, made by a child process that is killed when it is over."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import cog_triton.keeper.checkpoint_child as child
from cog_triton.errors import EngineNotParked, EngineNotRestored, from_text
from cog_triton.ipc.child import PythonChild
from cog_triton.keeper.cuda_checkpoint import ProcessState

_START_S = 60.0  # the driver's initialization on a machine of eight GPUs takes seconds
_CALL_S = 60.0
_MOST_BYTES = 1 << 20


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
        found = self._call("states", list(pids))
        return {int(pid): ProcessState(state) for pid, state in found.items()}

    def checkpoint(self, pids: Sequence[int]) -> None:
        """Move the processes off the GPU; raises E2110, or E2111 if they must be ended."""
        self._call("checkpoint", pids)

    def restore(self, pids: Sequence[int]) -> None:
        """Move the processes back, where they run again; raises E2111 if they must be ended."""
        self._call("restore", pids)

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

    def _call(self, call: str, pids: Sequence[int]) -> Any:
        lost = EngineNotParked if call == "states" else EngineNotRestored
        try:
            if self._child is None or not self._child.alive:
                self.close()
                self._child = PythonChild(child.__name__, timeout=_START_S)
        except OSError as error:
            raise EngineNotParked(f"the process for the driver's calls: {error}") from error
        try:
            self._child.connection.settimeout(self._timeout_s)
            self._child.send(json.dumps([call, list(pids)]).encode())
            kind, reply = self._child.receive(_MOST_BYTES)
        except TimeoutError as error:
            self.close()  # in the driver, perhaps for ever
            raise lost(f"the driver has not done its {call} in {self._timeout_s:g} s") from error
        except OSError as error:
            self.close()
            raise lost(f"the process for the driver's calls ended in {call}") from error
        told = bytes(reply).decode()
        if kind == child.FAILED:
            raise from_text(told) or lost(told)
        return json.loads(told)
