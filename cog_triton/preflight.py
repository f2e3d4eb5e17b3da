"""Before anything is loaded: whether the GPU here is the one that this image was made for.

An image for one GPU architecture has no device code for others, and says so in its
environment: COG_TRITON_SM, as nix/archs.nix names it. Without it, or with ``cpu``, there is
nothing to check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from cog_triton.errors import EngineIncompatible

_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR of cuda.h
_CAPABILITY_MINOR = 76
_CUDA_SUCCESS = 0
_CUDA_ERROR_NO_DEVICE = 100
_MAX_NAME = 256


def require_gpu(image_sm: str | None, read: Callable[[], Sequence[int]] | None = None) -> None:
    """Raise E1305 unless every GPU that CUDA shows has the compute capability `image_sm`.

    Args:
        image_sm: COG_TRITON_SM: ``86`` for 8.6; empty, None and ``cpu`` ask for nothing.
        read: gives the SM of each visible GPU; default the driver's, by `visible_gpus`.
    """
    if image_sm in (None, "", "cpu"):
        return
    found = (read or visible_gpus)()
    others = sorted({sm for sm in found if str(sm) != image_sm})
    if not found:
        raise EngineIncompatible(
            f"this image is for sm_{image_sm} and there is no GPU here: start it with"
            " `docker run --gpus=all`, on a machine with NVIDIA's driver and container toolkit"
        )
    if others:
        here = ", ".join(f"sm_{sm}" for sm in others)
        raise EngineIncompatible(
            f"this image is for sm_{image_sm}, this GPU is {here}: use the image"
            f" cog-triton-runner-{others[0]}"
        )


def visible_gpus() -> list[int]:
    """SM of each GPU in CUDA's order, by the driver's own library; empty if there is none.

    Raises:
        EngineIncompatible: there is a driver, and it does not work; carries CUDA's error number.
    """
    return [_capability(cuda, index) for cuda, index in _devices()]


def gpu_names() -> list[str]:
    """What the driver calls each GPU of `visible_gpus`, as ``NVIDIA H200``; raises as that does."""
    return [_name(cuda, index) for cuda, index in _devices()]


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
    """The driver is there and has no GPU to show."""


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


def _call(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = cuda[name](*arguments)
    if code == _CUDA_ERROR_NO_DEVICE:
        raise _NoDevice
    if code != _CUDA_SUCCESS:
        raise EngineIncompatible(
            f"NVIDIA's driver answers {name} with CUDA error {code}: it may be too old for this"
            " image's CUDA, whose driver floor is in the label cog-triton.driver"
        )
