"""Double of NVIDIA's driver that keeps checkpoints of processes, built where a C compiler is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_HERE = Path(__file__).parent
_DEVICES = _HERE.parent / "tensorrt_llm_tree" / "libcuda.c"
CUDA_13 = 13000
TOTAL_BYTES = 85899345920
STATES = ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED")


class CudaDriver:
    """A ``libcuda.so.1`` in a directory of its own, and what it was called with."""

    def __init__(self, directory: Path, api: int = CUDA_13) -> None:
        """Build it; `api` is its version, before 12080 without checkpoints."""
        compiler = shutil.which("cc")
        assert compiler, "needs a C compiler"
        self._state = directory / "state"
        self._state.mkdir(parents=True)
        library = directory / "libcuda.so.1"
        sources = [_DEVICES, _HERE / "checkpoint.c"]
        options = ["-Wall", "-Werror", "-shared", "-fPIC", f"-DAPI={api}"]
        subprocess.run([compiler, *options, "-o", library, *sources, "-ldl"], check=True)
        self.environment = {"LD_LIBRARY_PATH": str(directory)}

    @property
    def calls(self) -> list[tuple[str, int]]:
        """Checkpoint calls so far, each with its process, those that failed included."""
        path = self._state / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(name, int(pid)) for name, pid in map(str.split, lines)]

    def processes(self) -> dict[int, tuple[str, int]]:
        """State and bytes on the GPU of each process that ever had CUDA."""
        found = {}
        for path in self._state.iterdir():
            if path.name.isdecimal():
                state, held = map(int, path.read_text().split())
                found[int(path.name)] = STATES[state], held
        return found

    def fail(self, *faults: tuple[str, int, int | str]) -> None:
        """Let calls fail from now on: each a name, a process (0: any) and an error or "hang"."""
        lines = "".join(f"{name} {pid} {error}\n" for name, pid, error in faults)
        (self._state / "faults").write_text(lines)


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
