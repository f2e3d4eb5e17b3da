"""Hardware checks: GPUs, memory, shared memory, disk, ports."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cog_triton.artifact.compatibility import require_gpu, sm_names
from cog_triton.doctor.report import Check, fail, ok, warn
from cog_triton.errors import CogTritonError, EngineIncompatible, TritonStartFailed
from cog_triton.serving.coglet import cog_server
from cog_triton.system import ports as tcp_ports
from cog_triton.system.gpus import nvidia_smi
from cog_triton.system.host_memory import HostMemory, host_memory
from cog_triton.system.work_dir import require_usable

_PROC = Path("/proc")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_SERVERS = {b"cog_triton.front.server", b"--triton-only"}
_GB = 1e9
_QUERY = "gpu=name,memory.total,driver_version"
_OUR_REGIONS = re.compile(r"cog_triton_(\d+)_")


def own_server(ports: Collection[int]) -> dict[int, int]:
    """Process id of the server for each of `ports` that it, or a child of it, listens on.

    Only what this user may see of other processes is known.
    """
    inodes = {str(inode): port for port, inode in tcp_ports.listening_sockets() if port in ports}
    found: dict[int, int] = {}
    if not inodes:
        return found
    for process in _PROC.iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                match = _SOCKET.fullmatch(str(descriptor.readlink()))
                if (
                    match
                    and (port := inodes.get(match[1]))
                    and (server := _server(int(process.name)))
                ):
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
        require_gpu(image_sm, lambda: here)
    except EngineIncompatible as error:
        return fail("GPU", error.detail, "see docs/images.md for the images")
    if not here:
        return ok("GPU", "none; engines for the CPU need none")
    names = summarize(nvidia_smi(_QUERY)) or [f"{len(here)} with {sm_names(sorted({*here}))}"]
    return ok("GPU", f"{'; '.join(names)} ({sm_names(sorted({*here}))}){image}")


def memory(here: HostMemory | None = None) -> Check:
    """Check the memory that machine and container leave."""
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
    left = _leftovers(directory)
    if left:
        size = sum(path.stat().st_size for path in left)
        return warn(
            "shared memory",
            f"{found}; servers that are gone left {len(left)} regions, {size / 1e6:.1f} MB",
            f"rm -r {' '.join(sorted({_pattern(path) for path in left}))}",
        )
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


def summarize(gpus: Iterable[Sequence[str]]) -> list[str]:
    """Summarize rows of nvidia-smi (name, MiB, driver): a line and count for each kind of GPU."""
    counts: dict[str, int] = {}
    for name, mib, driver in gpus:
        size = f" {int(mib) * 2**20 / _GB:.0f} GB" if mib.isdecimal() else ""
        kind = f"{name}{size}, driver {driver}"
        counts[kind] = counts.get(kind, 0) + 1
    return [f"{count} x {kind}" for kind, count in counts.items()]


def _leftovers(directory: Path) -> list[Path]:
    """Shared memory regions of our servers whose process has ended."""
    return [
        path
        for path in directory.iterdir()
        if (match := _OUR_REGIONS.match(path.name)) and not Path("/proc", match[1]).exists()
    ]


def _pattern(path: Path) -> str:
    match = _OUR_REGIONS.match(path.name)
    assert match is not None
    return f"{path.parent / match[0]}*"
