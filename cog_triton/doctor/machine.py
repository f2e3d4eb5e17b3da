"""Checks of this machine: hardware, ports and disks, Python, Triton, the CUDA driver, mpirun."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cog_triton.artifact import cuda_support
from cog_triton.artifact.compatibility import backends_in, require_gpu, sm_names
from cog_triton.doctor.report import Check, fail, ok, warn
from cog_triton.engines.vllm import compiler_caches as caches
from cog_triton.errors import CogTritonError, EngineIncompatible, TritonStartFailed
from cog_triton.serving.coglet import cog_server
from cog_triton.settings import Settings
from cog_triton.sizing import gpu_table
from cog_triton.system import ports as tcp_ports
from cog_triton.system.gpus import installed_driver
from cog_triton.system.host_memory import HostMemory, host_memory
from cog_triton.system.work_dir import require_usable
from cog_triton.triton import launch
from cog_triton.triton.installation import TritonInstallation, missing_libpython

_PROC = Path("/proc")
_SERVERS = {b"cog_triton.front.server", b"--triton-only"}
_GB = 1e9
_TIMEOUT_S = 30
_OUR_REGIONS = re.compile(r"cog_triton_(\d+)_")


def own_server(ports: Collection[int]) -> dict[int, int]:
    """Process id of the server for each of `ports` that it, or a child of it, listens on."""
    listening = tcp_ports.listening_sockets()
    inodes = {f"socket:[{inode}]": port for port, inode in listening if port in ports}
    found: dict[int, int] = {}
    for process in _PROC.glob("[0-9]*") if inodes else ():
        with suppress(OSError):  # it ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                port = inodes.get(str(descriptor.readlink()))
                if port and (server := _server(int(process.name))):
                    found[port] = server
    return found


def _server(process: int) -> int | None:
    """The server that `process` is, or is below of."""
    while process > 0:
        directory = _PROC / str(process)
        try:
            if _SERVERS & {*(directory / "cmdline").read_bytes().split(b"\0")}:
                return process
            status = (directory / "stat").read_text("utf-8", "replace")
        except OSError:
            return None
        process = int(status.rpartition(")")[2].split()[1])
    return None


def gpu(image_sm: str | None, here: Sequence[int] | EngineIncompatible) -> Check:
    """Check the GPUs `here` (`system.gpus.visible_gpus`) against the image's COG_TRITON_SM."""
    if isinstance(here, EngineIncompatible):
        return fail("GPU", here.detail, "update NVIDIA's driver")
    image = f"; this image is for sm_{image_sm}" if image_sm not in (None, "", "cpu") else ""
    try:
        require_gpu(image_sm, here)
    except EngineIncompatible as error:
        return fail("GPU", error.detail, "see docs/images.md for the images")
    if not here:
        return ok("GPU", "none; engines for the CPU need none")
    kinds = Counter(f"{one.name} {one.memory / _GB:.0f} GB" for one in gpu_table.gpus_here())
    names = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return ok("GPU", f"{names} ({sm_names(sorted({*here}))}){image}")


def memory(here: HostMemory | None = None) -> Check:
    """Memory that machine and container leave."""
    here = here or host_memory()
    free, found = here.free, f"{here.free / _GB:.1f} GB free ({here.limits})"
    if free < 1 * _GB:
        return fail("memory", found, "1 GB is the least for Triton's models, engines on top")
    if free < 4 * _GB:
        return warn("memory", found, "enough for small engines; weights pass through it")
    return ok("memory", found)


def shared_memory(ranks: int, directory: Path = Path("/dev/shm")) -> Check:
    """Check free shared memory for Triton's stubs and NCCL, and leftovers of dead servers."""
    if not directory.is_dir():
        return fail("shared memory", f"no {directory}", "mount a tmpfs there")
    usage = shutil.disk_usage(directory)
    found = f"{usage.free / _GB:.2f} of {usage.total / _GB:.2f} GB free in {directory}"
    advice = "docker run --shm-size=2g, or an emptyDir of medium Memory on Kubernetes"
    if usage.free < 0.03 * _GB:
        return fail("shared memory", found, advice)
    left, size = set(), 0
    for path in directory.iterdir():
        match = _OUR_REGIONS.match(path.name)
        if match and not Path("/proc", match[1]).exists():
            left.add(f"{directory / match[0]}*")
            size += path.stat().st_size
    if left:
        found = f"{found}; servers that are gone left {size / 1e6:.1f} MB"
        return warn("shared memory", found, f"rm -r {' '.join(sorted(left))}")
    if ranks > 1 and usage.free < 1 * _GB:
        return warn("shared memory", f"{found}; NCCL wants 1 GB", advice)
    return ok("shared memory", found)


def disk(directory: Path, needed: int = 0) -> Check:
    """Check free disk space for unpacked engines below `directory`; `needed` is in bytes."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        require_usable(existing)
    except CogTritonError as error:
        return fail("disk", error.detail, "set COG_TRITON_WORK_DIR to another directory")
    free = shutil.disk_usage(existing).free
    found = f"{free / _GB:.1f} GB free at {directory}"
    advice = "free some, or set COG_TRITON_WORK_DIR to a larger disk"
    if free < needed + 0.5 * _GB:
        return fail("disk", f"{found}, {(needed / _GB) + 0.5:.1f} GB needed", advice)
    if free < needed + 5 * _GB:
        return warn("disk", found, advice)
    return ok("disk", found)


def predictions() -> Check:
    """Check the directory that Cog makes others in for each prediction."""
    try:
        cog_server.take_place()
    except TritonStartFailed as error:
        found, _, advice = error.detail.rpartition(": ")
        return warn("predictions", f"{found}; PORT answers 503 then", advice)
    cog_server.leave_place()
    return ok("predictions", f"Cog can write in {cog_server.PLACE}")


def free_ports(wanted: Mapping[str, tuple[str, int]]) -> list[Check]:
    """Check ports: one result for all free ports, or our own server's, and one for each other."""
    taken, free = {}, []
    for name, (host, port) in wanted.items():
        reason = tcp_ports.refusal(host, port)
        if reason is None:
            free.append(str(port))
        else:
            taken[port] = fail(
                f"port {port}", f"{host}:{port}: {reason}", f"stop its owner, or set {name}="
            )
    ours = own_server(taken)
    said = [f"{', '.join(free)} free"] if free else []
    for server in sorted({*ours.values()}):
        its = ", ".join(str(port) for port in taken if ours.get(port) == server)
        said.append(f"{its} in use by cog-triton (process {server}), which runs here")
    others = [check for port, check in taken.items() if port not in ours]
    return [*([ok("ports", "; ".join(said))] if said else []), *others]


def libpython(triton: TritonInstallation | TritonStartFailed) -> Check:
    """Check for the libpython that the stub of the wheel's tritonserver is linked with."""
    if isinstance(triton, TritonInstallation) and "pytriton" not in triton.binary.parts:
        return ok("libpython", f"not needed: {triton.binary} has a Python of its own")
    missing = missing_libpython()
    if missing is None:
        return ok("libpython", "here")
    package = missing.removesuffix(".so.1.0")
    return fail("libpython", f"no {missing}", f"on Debian: apt-get install {package}")


def tritonserver(triton: TritonInstallation | TritonStartFailed) -> Check:
    """Check that the binary exists and starts; `triton` is the error if none was found."""
    if isinstance(triton, TritonStartFailed):
        return fail("Triton", triton.detail, "`make setup` installs one, images have their own")
    if reason := _does_not_start([str(triton.binary), "--help"], triton.environment):
        found = f"{triton.binary}: {reason}"
        return fail("Triton", found, "set TRITONSERVER to one that runs here")
    return ok("Triton", f"{_triton_version(triton)}: {triton.binary}")


def backends(triton: TritonInstallation) -> Check:
    """Check for the python backend; an engine's own backend is checked with the engine."""
    found = backends_in(triton.backend_directory)
    if "python" in found:
        return ok("backends", ", ".join(found))
    here = f"{', '.join(found) or 'none'} in {triton.backend_directory}"
    advice = "the text models need the python backend: use NVIDIA's *-py3 or a runner image"
    return fail("backends", here, advice)


def cuda_driver(cuda: str | None, what: str, gpus: Sequence[str] = (), *, compat: bool) -> Check:
    """Check the driver against `cuda` in `what`, as `cuda_support.require_driver` does."""
    here = installed_driver()
    if here.cuda is None and here.version is None:
        advice = "for a GPU install NVIDIA's driver, and start containers with --gpus=all"
        return warn("CUDA driver", "no libcuda.so.1: engines for the CPU only", advice)
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
    try:
        path = launch.find_mpirun(settings)
    except TritonStartFailed as error:
        if ranks > 1 or settings.mpirun:
            return fail("mpirun", error.detail, "on Debian: apt-get install openmpi-bin")
        return ok("mpirun", "not here; only engines of several ranks need it")
    reason = _does_not_start([path, "--version"], os.environ)
    if reason is not None and ranks > 1:
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
    pipes: Any = {"stdin": subprocess.DEVNULL, "capture_output": True}
    env = dict(environment)
    try:
        done = subprocess.run(command, env=env, timeout=_TIMEOUT_S, check=False, **pipes)
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
