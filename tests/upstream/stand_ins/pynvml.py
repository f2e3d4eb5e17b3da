"""Stand-in of NVML: the library is there, and no driver."""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "11.5.3"
nvmlMemory_v2 = 0x2000028  # noqa: N816


class NVMLError(Exception):
    """Error of the driver."""


def nvmlInit() -> None:  # noqa: N802
    """Succeed, as imports of TensorRT-LLM call it."""


def nvmlShutdown() -> None:  # noqa: N802
    """End what `nvmlInit` began."""


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    """A driver that no release of TensorRT-LLM warns of."""
    return "560.35.05"


def nvmlDeviceGetMemoryInfo(*_: Any, **__: Any) -> NoReturn:  # noqa: N802
    """There is no device.

    Raises:
        NVMLError: always.
    """
    raise NVMLError("stand-in of NVML: no device")
