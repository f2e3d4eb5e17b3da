"""Double of vllm/device_allocator/cumem.py: an engine's bytes on a GPU, where there is one.

The GPU is that of tests/cuda_driver; without it there is none, and nothing is held.
"""

from __future__ import annotations

import ctypes
import math

_ASLEEP_BYTES = 1_700_000_000  # contexts and CUDA graphs, as measured with 0.26
_OF_GIB = 1 << 30


class CuMemAllocator:
    """All memory of one engine, weights and KV cache, taken at its start."""

    def __init__(self, utilization: float) -> None:
        self._cuda = _driver()
        self._bytes = 0
        if self._cuda is None:
            return
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        self._bytes = math.ceil(utilization * total.value)
        if free.value < self._bytes:
            raise ValueError(
                f"Free memory on device cuda:0 ({free.value / _OF_GIB:.2f}/"
                f"{total.value / _OF_GIB:.2f} GiB) on startup is less than desired GPU memory"
                f" utilization ({utilization}, {self._bytes / _OF_GIB:.2f} GiB). Decrease GPU"
                " memory utilization or reduce GPU memory used by other processes."
            )
        self._hold(self._bytes)

    def sleep(self) -> None:
        """Give back what is in its pool; waits, as all of CUDA, while the process is locked."""
        self._hold(min(self._bytes, _ASLEEP_BYTES))

    def wake_up(self) -> None:
        """Take it again."""
        self._hold(self._bytes)

    def _hold(self, count: int) -> None:
        if self._cuda is not None and self._cuda.doubleHold(ctypes.c_longlong(count)):
            raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp")


def _driver() -> ctypes.CDLL | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if hasattr(cuda, "doubleHold") and not cuda.cuInit(0) else None
