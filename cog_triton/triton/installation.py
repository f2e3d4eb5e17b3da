"""Triton installation: the tritonserver binary, its backends, and the environment it needs."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import EngineIncompatible, TritonStartFailed
from cog_triton.system import isolated_python

_IMAGE_BINARY = Path("/opt/tritonserver/bin/tritonserver")
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """A usable tritonserver; `environment` is complete, not an addition to ours."""

    binary: Path
    backend_directory: Path
    environment: Mapping[str, str]


def find_installation(
    work_dir: Path, binary: Path | None = None, backends: Path | None = None
) -> TritonInstallation:
    """Find `binary`, the image's, PATH's, or the nvidia-pytriton wheel's tritonserver.

    The wheel's server runs models in our own Python, and its Python backend is assembled under
    `work_dir`. Any other runs them in its own Python, to which only this package is added.
    `backends` replaces the server's own. Raises E2106 saying what to do, and
    E1305 for a server of an older Python.
    """
    if backends is not None and not backends.is_dir():
        raise TritonStartFailed(f"TRITONSERVER_BACKEND_DIR={str(backends)!r}: not a directory")
    binary = binary or machine_binary()
    if binary is None:
        return _from_wheel(work_dir, backends)
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise TritonStartFailed(f"TRITONSERVER={str(binary)!r}: not an executable file")
    backends = backends or binary.resolve().parent.parent / "backends"
    _require_supported_python(binary, backends / "python" / _STUB)
    return TritonInstallation(binary, backends, isolated_python.environment(work_dir / "python"))


def _require_supported_python(binary: Path, stub: Path) -> None:
    """Raise E1305 for a stub linked with an older Python than ours may be, as of NGC's to 24.10."""
    linked = re.search(rb"libpython3\.(\d+)\.so", stub.read_bytes()) if stub.is_file() else None
    if linked is not None and int(linked[1]) < 11:
        raise EngineIncompatible(
            f"{binary}: its Python backend runs Python 3.{int(linked[1])}, and cog-triton needs"
            " 3.11 or newer: take an NGC release of 24.11 or later (Python 3.12)"
        )


def machine_binary() -> Path | None:
    """The image's or PATH's tritonserver; None if there is no other than the wheel's."""
    found = shutil.which("tritonserver")
    return _IMAGE_BINARY if _IMAGE_BINARY.is_file() else Path(found) if found else None


def missing_libpython() -> str | None:
    """Name of the libpython that the wheel's Python stub is linked with, if it is not here."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if (Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib") / name).exists():
        return None
    try:
        ctypes.CDLL(name)
    except OSError:
        return name
    return None


def _from_wheel(work_dir: Path, backends: Path | None) -> TritonInstallation:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise TritonStartFailed(
            "no tritonserver: set TRITONSERVER to its path, put it in PATH, or install the"
            " nvidia-pytriton wheel (`make setup`)"
        )
    root = Path(spec.submodule_search_locations[0]) / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        raise TritonStartFailed(f"no Python {version} stub in {stub.parent.parent}")
    libraries = [sysconfig.get_config_var("LIBDIR") or "/usr/lib"]
    libraries += [str(root.parent.parent / "nvidia_pytriton.libs")]
    libraries += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    return TritonInstallation(
        root / "bin" / "tritonserver",
        _link_backends(backends or root / "backends", stub, work_dir / "backends"),
        {
            **os.environ,
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "LD_LIBRARY_PATH": ":".join(libraries),
        },
    )


def _link_backends(source: Path, stub: Path, target: Path) -> Path:
    """Link the wheel's backends into `target`, and put the stub, which it keeps apart, in place."""
    placed = target / "python" / _STUB
    for directory, _, names in os.walk(source, followlinks=True):
        copied = target / Path(directory).relative_to(source)
        copied.mkdir(parents=True, exist_ok=True)
        # As the runtime of other backends Triton takes no link out of its directory.
        place = shutil.copyfile if copied.name == "python" else os.symlink
        for name in names:
            (copied / name).unlink(missing_ok=True)
            place(Path(directory, name), copied / name)
    placed.unlink(missing_ok=True)
    shutil.copy(stub, placed)
    placed.chmod(0o755)
    return target
