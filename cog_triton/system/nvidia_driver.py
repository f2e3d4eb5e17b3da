"""NVIDIA's driver of this machine: its version, its CUDA, its devices and what is free on them.

NVML tells of the driver whatever CUDA can use of it; libcuda may be a newer one than the driver,
by CUDA's forward compatibility package.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_DEVICES = Path("/dev")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_MAX_TEXT = 96


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


def installed() -> NVIDIADriver:
    """The driver of this machine; nothing is initialized on a GPU."""
    with _nvml() as ask:
        text = ctypes.create_string_buffer(_MAX_TEXT)
        told = ask("nvmlSystemGetDriverVersion", text, _MAX_TEXT)
    version = text.value.decode("utf-8", "replace") if told else _kernel_module()
    return NVIDIADriver(version, _cuda())


def devices() -> list[str]:
    """NVIDIA's GPUs that this process sees, whether CUDA can use them or not."""
    found = sorted(str(path) for path in _DEVICES.glob("nvidia[0-9]*"))
    with _nvml() as ask:
        count = ctypes.c_uint()
        if not found and ask("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            found = [f"GPU {index} of nvidia-smi" for index in range(count.value)]
    return found


def free_memory(bus_id: str) -> int | None:
    """Bytes free on the GPU with this PCI bus id; None if NVML does not tell."""
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
