"""GPUs of this machine, and NVIDIA's driver of them: what it is, what CUDA can use, what is free.

Also which of them each of several engines has.

NVML tells of the driver whatever CUDA can use of it; libcuda may be a newer one than the driver,
by CUDA's forward compatibility package.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from cog_triton.errors import EngineIncompatible

_DEVICES = Path("/dev")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_MAX_TEXT = 96
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Variable of the GPUs that a process may use, in their order."""
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR of cuda.h
_CAPABILITY_MINOR = 76
_CUDA_SUCCESS = 0
_CUDA_ERROR_NO_DEVICE = 100
_MAX_NAME = 256
_NONE = ("", "-1", "NoDevFiles")
# Of cuda.h's CUresult.
_MEANINGS = {
    3: "CUDA cannot be initialized",
    34: "libcuda is a stub",
    802: "the NVLink fabric is not ready: start nvidia-fabricmanager",
    803: "libcuda and the driver are of versions that do not go together",
    804: "the forward compatibility library (cuda-compat) is for data centre GPUs alone",
    999: "the driver failed; see dmesg",
}
_ADVICE = (
    "start containers with --gpus=all (NVIDIA_DRIVER_CAPABILITIES=compute,utility), set"
    f" {VISIBLE_GPUS}= (empty) to serve on the CPU, or update NVIDIA's driver"
)


@dataclass(frozen=True, slots=True)
class NVIDIADriver:
    """Version of the driver, as ``580.95.05``, and CUDA's that libcuda has; None is not known."""

    version: str | None = None
    cuda: tuple[int, int] | None = None

    def __str__(self) -> str:
        cuda = f"CUDA {self.cuda[0]}.{self.cuda[1]}" if self.cuda else "no libcuda.so.1"
        return f"driver {self.version or 'of unknown version'} ({cuda})"


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def installed_driver() -> NVIDIADriver:
    """The driver of this machine; nothing is initialized on a GPU."""
    with _nvml() as ask:
        text = ctypes.create_string_buffer(_MAX_TEXT)
        told = ask("nvmlSystemGetDriverVersion", text, _MAX_TEXT)
    version = text.value.decode("utf-8", "replace") if told else _kernel_module()
    return NVIDIADriver(version, _cuda())


def nvidia_devices() -> list[str]:
    """NVIDIA's GPUs that this process sees, whether CUDA can use them or not."""
    found = sorted(str(path) for path in _DEVICES.glob("nvidia[0-9]*"))
    with _nvml() as ask:
        count = ctypes.c_uint()
        if not found and ask("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            found = [f"GPU {index} of nvidia-smi" for index in range(count.value)]
    return found


def _free_memory(bus_id: str) -> int | None:
    with _nvml() as ask:
        handle, memory = ctypes.c_void_p(), _Memory()
        known = ask(
            "nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(handle)
        ) and ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return int(memory.free) if known else None


def _cuda() -> tuple[int, int] | None:
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1")["cuDriverGetVersion"](ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _kernel_module() -> str | None:
    try:
        match = _VERSION.search(_KERNEL_MODULE.read_text("utf-8", "replace"))
    except OSError:
        return None
    return match[1] if match else None


@contextmanager
def _nvml() -> Iterator[Callable[..., bool]]:
    """Call of NVML by name: whether it succeeded. All calls fail where there is no NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        there = nvml["nvmlInit_v2"]() == 0
    except (OSError, AttributeError):
        yield lambda *_: False
        return
    try:
        yield lambda name, *arguments: there and nvml[name](*arguments) == 0
    finally:
        if there:
            nvml["nvmlShutdown"]()


def hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs, which chooses the CPU."""
    return os.environ.get(VISIBLE_GPUS) in _NONE


def visible_gpus() -> list[int]:
    """SM of each GPU in CUDA's order, as 90 for 9.0; empty without an NVIDIA GPU.

    An empty CUDA_VISIBLE_DEVICES hides all, and nothing is asked then.

    Raises:
        EngineIncompatible: an NVIDIA GPU is here that CUDA cannot use, so that nothing falls back
            to the CPU in silence; carries the driver's version and what to do.
    """
    return [_capability(cuda, index) for cuda, index in _devices()]


def gpu_names() -> list[str]:
    """Name of each GPU of `visible_gpus`, as ``NVIDIA H200``; raises as that does."""
    return [_text("cuDeviceGetName", *device) for device in _devices()]


def gpu_memory() -> list[int]:
    """Memory in bytes of each GPU of `visible_gpus`; raises as that does."""
    return [_memory(cuda, index) for cuda, index in _devices()]


def free_memory() -> list[int | None]:
    """Bytes free on each GPU of `visible_gpus`, None where NVML does not tell; raises as that."""
    buses = [_text("cuDeviceGetPCIBusId", *device) for device in _devices()]
    return [_free_memory(bus) for bus in buses]


def _devices() -> list[tuple[ctypes.CDLL, int]]:
    if hidden():
        return []
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        _require_none("there is no libcuda.so.1")
        return []
    count = ctypes.c_int()
    try:
        _call(cuda, "cuInit", 0)
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    except _NoDevice:
        _require_none(f"CUDA finds no GPU (error {_CUDA_ERROR_NO_DEVICE})")
        return []
    return [(cuda, index) for index in range(count.value)]


def _require_none(problem: str) -> None:
    """Raise E1305 if there is an NVIDIA GPU, which `problem` keeps CUDA from."""
    if here := nvidia_devices():
        raise EngineIncompatible(
            f"{', '.join(here)} is here, {installed_driver()}, and {problem}: {_ADVICE}"
        )


class _NoDevice(Exception):
    """The driver works and has no GPU."""


def _capability(cuda: ctypes.CDLL, index: int) -> int:
    value, numbers = ctypes.c_int(), []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, index)
        numbers.append(value.value)
    return 10 * numbers[0] + numbers[1]


def _text(call: str, cuda: ctypes.CDLL, index: int) -> str:
    text = ctypes.create_string_buffer(_MAX_NAME)
    _call(cuda, call, text, _MAX_NAME, index)
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
        why = f", {_MEANINGS[code]}" if code in _MEANINGS else ""
        raise EngineIncompatible(
            f"NVIDIA's driver answers {name} with CUDA error {code}{why}; here is"
            f" {installed_driver()}, which may be too old for this image's CUDA (its floor"
            f" is the label cog-triton.driver): {_ADVICE}"
        )


@dataclass(frozen=True, slots=True)
class EngineReplicas:
    """Number of engines, and the CUDA_VISIBLE_DEVICES of each.

    Without `gpus` all see the same ones, or there are none.
    """

    count: int = 1
    gpus: Sequence[str] = ()


ONE = EngineReplicas()


def share_gpus(
    count: int,
    needed: int,
    environment: Mapping[str, str] = os.environ,
    count_gpus: Callable[[], int] = lambda: len(visible_gpus()),
) -> EngineReplicas:
    """Replicas of `needed` GPUs each, in the order of CUDA_VISIBLE_DEVICES where that is set.

    Engines that need no GPU share none; nor do any where the driver knows of no GPU, as the engine
    itself says best what it lacks. Raises E1305 where there are GPUs, and too few.
    """
    if count == 1 or not needed:
        return EngineReplicas(count)
    given = environment.get(VISIBLE_GPUS)
    if given is None:
        names = [str(number) for number in range(count_gpus())]
        if not names:
            return EngineReplicas(count)
    else:
        listed = (name.strip() for name in given.split(",") if name.strip())
        # CUDA sees none from a negative number on; of a GPU that is named twice there is but one.
        names = list(dict.fromkeys(takewhile(lambda name: not name.startswith("-"), listed)))
    if len(names) < count * needed:
        here = f"{VISIBLE_GPUS}={given}" if given is not None else "this machine"
        raise EngineIncompatible(
            f"ENGINE_REPLICAS={count}: needs {count * needed} GPUs, {needed} for each engine;"
            f" {here} has {len(names)}"
        )
    shares = (names[start : start + needed] for start in range(0, count * needed, needed))
    return EngineReplicas(count, tuple(",".join(share) for share in shares))
