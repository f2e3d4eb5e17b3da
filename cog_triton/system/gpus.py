"""GPUs of this machine by NVIDIA's driver: compute capability (SM) and name of each."""

from __future__ import annotations

import ctypes

from cog_triton.errors import EngineIncompatible

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Variable of the GPUs that a process may use, in their order."""
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR of cuda.h
_CAPABILITY_MINOR = 76
_CUDA_SUCCESS = 0
_CUDA_ERROR_NO_DEVICE = 100
_MAX_NAME = 256


def visible_gpus() -> list[int]:
    """SM of each GPU in CUDA's order, as 90 for 9.0; empty without GPU or driver.

    Raises:
        EngineIncompatible: the driver fails; carries CUDA's error number.
    """
    return [_capability(cuda, index) for cuda, index in _devices()]


def gpu_names() -> list[str]:
    """Name of each GPU of `visible_gpus`, as ``NVIDIA H200``; raises as that does."""
    return [_name(cuda, index) for cuda, index in _devices()]


def gpu_memory() -> list[int]:
    """Memory in bytes of each GPU of `visible_gpus`; raises as that does."""
    return [_memory(cuda, index) for cuda, index in _devices()]


def _devices() -> list[tuple[ctypes.CDLL, int]]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    try:
        _call(cuda, "cuInit", 0)
        count = ctypes.c_int()
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    except _NoDevice:
        return []
    return [(cuda, index) for index in range(count.value)]


class _NoDevice(Exception):
    """The driver works and has no GPU."""


def _capability(cuda: ctypes.CDLL, index: int) -> int:
    value, numbers = ctypes.c_int(), []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, index)
        numbers.append(value.value)
    return 10 * numbers[0] + numbers[1]


def _name(cuda: ctypes.CDLL, index: int) -> str:
    text = ctypes.create_string_buffer(_MAX_NAME)
    _call(cuda, "cuDeviceGetName", text, _MAX_NAME, index)
    return text.value.decode("utf-8", "replace")


def _memory(cuda: ctypes.CDLL, index: int) -> int:
    size = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(size), index)
    return size.value


def _call(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = cuda[name](*arguments)
    if code == _CUDA_ERROR_NO_DEVICE:
        raise _NoDevice
    if code != _CUDA_SUCCESS:
        raise EngineIncompatible(
            f"NVIDIA's driver answers {name} with CUDA error {code}: it may be too old for this"
            " image's CUDA, whose driver floor is in the label cog-triton.driver"
        )
