"""Double of NVIDIA's driver, built if there is a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_HERE = Path(__file__).parent


def gpu_driver(directory: Path, libcuda: bool = True, **facts: object) -> dict[str, str]:
    """Environment of a process on a machine with GPUs, by gpus.c, whose variables `facts` are.

    Without `libcuda` there is NVML alone, as where a container was given no libcuda.
    """
    compiler = shutil.which("cc")
    assert compiler, "needs a C compiler"
    directory.mkdir(parents=True, exist_ok=True)
    nvml = directory / "libnvidia-ml.so.1"
    options = ["-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", nvml, _HERE / "gpus.c"], check=True)
    if libcuda:
        (directory / "libcuda.so.1").symlink_to(nvml.name)
    given = {f"FAKE_{name.upper()}": str(value) for name, value in facts.items()}
    return {"LD_LIBRARY_PATH": str(directory), **given}


def has_compiler() -> bool:
    """Whether a C compiler is there to build it."""
    return shutil.which("cc") is not None
