"""CUDA checkpointing: NVIDIA's driver moves another process's GPU memory to host memory and back.

Source: "CUDA Checkpointing" of the driver API, CUDA 12.8 (driver 570) and later. The process keeps
its context, allocations, streams and captured CUDA graphs; its CUDA calls block meanwhile. As of
driver 580, memory that several processes share (CUDA IPC, NVLink multicast) cannot be moved.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

from cog_triton.errors import EngineNotParked

LIBRARY = "libcuda.so.1"
LEAST_API = 12080
"""The driver API's version that has it, as cuDriverGetVersion tells: CUDA 12.8."""
_CALLS = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")
_NO_CUDA = {1, 3, 304}
"""What is answered for a process without CUDA, or one that has just ended; see `_ERRORS`."""
_ERRORS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    34: "CUDA_ERROR_STUB_LIBRARY",
    100: "CUDA_ERROR_NO_DEVICE",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    401: "CUDA_ERROR_ILLEGAL_STATE",
    600: "CUDA_ERROR_NOT_READY",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    999: "CUDA_ERROR_UNKNOWN",
}


class ProcessState(IntEnum):
    """CUprocessState of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs; the other calls' arguments may be NULL."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class CudaCheckpoint:
    """Checkpoint calls of this machine's driver, each on one process by its pid.

    Every call but `state` raises E2110 with CUDA's error; they block until the driver is done, for
    which it sets itself no limit but `lock`'s.
    """

    def __init__(self) -> None:
        """Load and initialize the driver; raises E2110 if it is none or cannot checkpoint."""
        try:
            self._cuda = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise EngineNotParked(f"no driver: {error}") from error
        self._check("cuInit", self._cuda["cuInit"](0))
        version = ctypes.c_int()
        self._check("cuDriverGetVersion", self._cuda["cuDriverGetVersion"](ctypes.byref(version)))
        self.api = version.value
        """The driver API's version: 13000 for CUDA 13.0."""
        if self.api < LEAST_API or not all(map(self._has, _CALLS)):
            raise EngineNotParked(
                f"the driver is one of CUDA {self.api // 1000}.{self.api % 1000 // 10}, and"
                " checkpoints of processes come with 12.8 (driver 570)"
            )

    def state(self, pid: int) -> ProcessState | None:
        """State of a process's CUDA; None for one that has none."""
        state = ctypes.c_int()
        name = "cuCheckpointProcessGetState"
        code = self._cuda[name](ctypes.c_int(pid), ctypes.byref(state))
        if code in _NO_CUDA:
            return None
        self._check(name, code, pid)
        return ProcessState(state.value)

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Wait for work on the GPU and block further CUDA calls: RUNNING to LOCKED.

        A process that has not come to rest within `timeout_ms` stays RUNNING.
        """
        arguments = _LockArguments(timeout_ms=timeout_ms)
        name = "cuCheckpointProcessLock"
        self._check(name, self._cuda[name](ctypes.c_int(pid), ctypes.byref(arguments)), pid)

    def checkpoint(self, pid: int) -> None:
        """Move GPU memory to host memory and let go of the GPU: LOCKED to CHECKPOINTED."""
        self._change("Checkpoint", pid)

    def restore(self, pid: int) -> None:
        """Take the GPU again and move memory back to its addresses: CHECKPOINTED to LOCKED."""
        self._change("Restore", pid)

    def unlock(self, pid: int) -> None:
        """Let CUDA calls go on: LOCKED to RUNNING."""
        self._change("Unlock", pid)

    def _change(self, call: str, pid: int) -> None:
        name = f"cuCheckpointProcess{call}"
        self._check(name, self._cuda[name](ctypes.c_int(pid), None), pid)

    def _has(self, call: str) -> bool:
        try:
            self._cuda[f"cuCheckpointProcess{call}"]
        except AttributeError:
            return False
        return True

    @staticmethod
    def _check(name: str, code: int, pid: int | None = None) -> None:
        if code:
            told = _ERRORS.get(code, f"CUDA error {code}")
            raise EngineNotParked(f"{name} of process {pid}: {told}" if pid else f"{name}: {told}")
