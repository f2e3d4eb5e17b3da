"""Software checks: Python, tritonserver and its backends, CUDA driver, mpirun, caches."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from cog_triton.artifact import cuda_support
from cog_triton.artifact.compatibility import backends_in
from cog_triton.doctor.report import Check, fail, ok, warn
from cog_triton.engines.vllm import compiler_caches as caches
from cog_triton.errors import EngineIncompatible, TritonStartFailed
from cog_triton.settings import Settings
from cog_triton.system.gpus import installed_driver
from cog_triton.triton import launch
from cog_triton.triton.installation import TritonInstallation, missing_libpython

_PYTHONS = ((3, 11), (3, 12))
_TIMEOUT_S = 30


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Check that the package supports this Python."""
    text = ".".join(map(str, version))
    if _PYTHONS[0] <= version[:2] <= _PYTHONS[1]:
        return ok("Python", text)
    return fail("Python", text, "use Python 3.11 or 3.12: `make setup PYTHON=python3.11`")


def libpython(triton: TritonInstallation | None) -> Check:
    """Check for the libpython that the stub of the wheel's tritonserver is linked with."""
    if triton is not None and "pytriton" not in triton.binary.parts:
        return ok("libpython", f"not needed: {triton.binary} has a Python of its own")
    missing = missing_libpython()
    if missing is None:
        return ok("libpython", "here")
    package = missing.removesuffix(".so.1.0")
    return fail("libpython", f"no {missing}", f"on Debian: apt-get install {package}")


def tritonserver(triton: TritonInstallation | None, error: TritonStartFailed | None) -> Check:
    """Check that the binary exists and starts; `error` says why it was not found."""
    if triton is None:
        detail = error.detail if error else "not found"
        return fail("Triton", detail, "`make setup` installs one, images have their own")
    reason = _does_not_start([str(triton.binary), "--help"], triton.environment)
    if reason is not None:
        return fail(
            "Triton", f"{triton.binary}: {reason}", "set TRITONSERVER to one that runs here"
        )
    return ok("Triton", f"{_triton_version(triton)}: {triton.binary}")


def backends(triton: TritonInstallation) -> Check:
    """Check for the python backend; an engine's own backend is checked with the engine."""
    found = backends_in(triton.backend_directory)
    if "python" not in found:
        return fail(
            "backends",
            f"{', '.join(found) or 'none'} in {triton.backend_directory}",
            "the text models need the python backend: use NVIDIA's *-py3 images or a runner image",
        )
    return ok("backends", ", ".join(found))


def cuda_driver(cuda: str | None, what: str, gpus: Sequence[str] = (), *, compat: bool) -> Check:
    """Check the driver against `cuda` in `what`, as `cuda_support.require_driver` does."""
    here = installed_driver()
    if here.cuda is None and here.version is None:
        return warn(
            "CUDA driver",
            "no libcuda.so.1: engines for the CPU only",
            "for a GPU install NVIDIA's driver, and start containers with --gpus=all",
        )
    if cuda is None:
        return ok("CUDA driver", str(here))
    try:
        remark = cuda_support.require_driver(cuda, here, what, gpus, compat=compat)
    except EngineIncompatible as error:
        return fail("CUDA driver", error.detail, "see docs/images.md, Drivers")
    if remark is not None:
        return warn("CUDA driver", remark, "update NVIDIA's driver to be sure")
    return ok("CUDA driver", f"{here}; {what} has CUDA {cuda}")


def mpirun(settings: Settings, ranks: int) -> Check:
    """Check for mpirun, which only engines of several ranks need."""
    wanted = ranks > 1
    try:
        path = launch.find_mpirun(settings)
    except TritonStartFailed as error:
        if wanted or settings.mpirun:
            return fail("mpirun", error.detail, "on Debian: apt-get install openmpi-bin")
        return ok("mpirun", "not here; only engines of several ranks need it")
    reason = _does_not_start([path, "--version"], os.environ)
    if reason is not None and wanted:
        return fail("mpirun", f"{path}: {reason}", "set MPIRUN to one that runs here")
    return ok("mpirun", f"{path}{f', which does not run: {reason}' if reason else ''}")


def compiler_caches(settings: Settings) -> Check:
    """Tell what the compilers of vLLM engines have left, where, and how much it may be."""
    name, most = "compiler caches", settings.compiler_cache_bytes
    base = settings.work_dir / caches.FOLDER
    if not most:
        return ok(name, "off (COMPILER_CACHE_BYTES=0): vLLM engines compile at every start")
    try:
        kept = caches.kept(base)
    except (OSError, EngineIncompatible) as error:
        advice = "remove it, or set COG_TRITON_WORK_DIR to a directory of your own"
        return warn(name, f"{error}: vLLM engines compile at every start", advice)
    held = sum(engine.bytes for engine in kept) / 1e9
    return ok(name, f"{len(kept)} vLLM engines, {held:.2f} GB of {most / 1e9:.1f} GB: {base}")


def _does_not_start(command: list[str], environment: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode in (0, 1):  # some versions of tritonserver end their --help with 1
        return None
    said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"


def _triton_version(triton: TritonInstallation) -> str:
    file = triton.binary.resolve().parent.parent / "TRITON_VERSION"
    if file.is_file():
        return file.read_text("utf-8").strip()
    if "pytriton" in triton.binary.parts:
        return f"nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}"
    return os.environ.get("TRITON_SERVER_VERSION", "version unknown")
