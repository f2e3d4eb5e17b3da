"""Files of NVIDIA's driver that a container gets: as NVIDIA's container toolkit mounts them.

For the capabilities compute and utility (libnvidia-container, src/nvc_info.c): the libraries go to
the distribution's library directory, programs to /usr/bin, devices to /dev.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

TARGET = "usr/lib/x86_64-linux-gnu"
_PLACES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
)
_LIBRARIES = (
    "libcuda", "libcudadebugger", "libnvidia-ml", "libnvidia-cfg", "libnvidia-opencl",
    "libnvidia-gpucomp", "libnvidia-ptxjitcompiler", "libnvidia-allocator", "libnvidia-nvvm",
    "libnvidia-nvvm70", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3", "libnvidia-tileiras",
)  # fmt: skip
_PROGRAMS = ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced")


def libraries() -> list[Path]:
    """The driver's libraries and the links to them, all of the directory that has libcuda.so.1."""
    try:
        command, environment = ["ldconfig", "-p"], {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
        told = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    except OSError:
        told = ""
    known = [Path(path).parent for path in re.findall(r"libcuda\.so\.1 .*=> (\S+)", told)]
    for place in (*known, *map(Path, _PLACES)):
        if (place / "libcuda.so.1").exists() and "compat" not in place.parts:
            pattern = re.compile(rf"({'|'.join(map(re.escape, _LIBRARIES))})\.so(\.[\d.]+)?")
            return sorted(path for path in place.iterdir() if pattern.fullmatch(path.name))
    return []


def programs() -> list[Path]:
    """The driver's programs."""
    found = (shutil.which(name) for name in _PROGRAMS)
    return [Path(path) for path in found if path]


def devices() -> list[Path]:
    """The driver's device files."""
    caps = Path("/dev/nvidia-caps")
    return sorted(Path("/dev").glob("nvidia*[!s]")) + (
        list(caps.iterdir()) if caps.is_dir() else []
    )


def inside(root: Path, path: str | Path) -> Path:
    """`path` below `root`, in a directory that is made; raises ValueError if a link leads out."""
    target = root / str(path).lstrip("/")
    if not target.parent.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{target}: a link leads out of {root}")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def place(root: Path) -> list[tuple[Path, Path]]:
    """Make links and mount points below `root`; returns what is to be bound where."""
    bound = []
    for source in libraries():
        target = inside(root, f"{TARGET}/{source.name}")
        if source.is_symlink() and source.resolve().parent == source.parent.resolve():
            if not target.is_symlink():
                target.symlink_to(source.resolve().name)
        else:
            target.touch()
            bound.append((source.resolve(), target))
    for source in programs():
        target = inside(root, f"usr/bin/{source.name}")
        target.touch()
        bound.append((source.resolve(), target))
    return bound
