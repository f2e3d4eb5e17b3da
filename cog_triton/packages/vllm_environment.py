"""vLLM's environment: a Python 3.12 of its own with what the lock of vLLM pins, made by uv."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

from cog_triton.download import disk_space
from cog_triton.download.transfer_progress import Echo, size_text
from cog_triton.errors import ModelUnavailable, TritonStartFailed
from cog_triton.packages import package_set
from cog_triton.packages.package_set import UV, find_uv, provide, run_installer
from cog_triton.system.paths import data_file

PYTHON = "3.12"
"""Version of Python that the lock is for."""
_DOWNLOAD, _UNPACKED = 3_300_000_000, 8_000_000_000
_DONE = "cog-triton.lock"
_CHECK_S = 120.0
_CHECK = """
import importlib.metadata, pathlib, sys, sysconfig
print(importlib.metadata.version(sys.argv[1]))
print(pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())
"""


class VLLMEnvironment(NamedTuple):
    """The environment of one lock below the work directory; there or to be made."""

    directory: Path
    lock: Path
    text: str

    @classmethod
    def of(cls, work_dir: Path, lock: Path | None = None) -> VLLMEnvironment:
        """That of `lock`, by default the one that the package carries."""
        lock = (lock or data_file("requirements/vllm.lock")).absolute()
        text = package_set.locked(lock)
        return cls(work_dir.absolute() / "vllm" / package_set.key(text, PYTHON), lock, text)

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.directory / "bin" / "python"

    @property
    def ready(self) -> bool:
        """Whether it was made, to its end."""
        return (self.directory / _DONE).is_file() and self.python.exists()

    def commands(self, python: str = PYTHON) -> list[list[str]]:
        """The commands that make it of `python`, a version or path that uv understands."""
        uv = find_uv() or "uv"
        install = [uv, "pip", "install", "--python", str(self.python), *package_set.CHOSEN]
        return [
            [uv, "venv", "--allow-existing", "--python", python, str(self.directory)],
            [*install, "-r", str(self.lock)],
        ]

    def plan(self, python: str = PYTHON) -> list[str]:
        """What `make` would do, as lines to read and to copy from."""
        count = len(package_set.versions(self.text))
        return [
            f"lock      {self.lock} ({count} packages)",
            f"makes     {self.directory}{' (ready)' if self.ready else ''}",
            *(f"runs      {shlex.join(command)}" for command in self.commands(python)),
        ]

    def make(self, echo: Echo, python: str = PYTHON) -> None:
        """Make it, or go on where an earlier attempt ended; a second process waits.

        Raises:
            MissingExtra: uv is not here, nor pip to fetch it.
            ModelUnavailable: Python 3.12 or a package cannot be had; says which.
            DiskFull: there is no room.
        """
        versions = package_set.versions(self.text)
        what = "vLLM's environment"
        with disk_space.writing(self.directory, what, echo, threading.Event()):
            if self.ready:
                return
            if find_uv() is None:
                provide(UV, self.directory.parents[1] / "packages", echo)
            if "torch" in versions and not self.python.exists():
                name = f"vLLM {versions.get('vllm', '')}"
                echo(
                    f"[setup] {name}: {len(versions)} packages, some {size_text(_DOWNLOAD)} to"
                    f" download, {size_text(_UNPACKED)} in {self.directory}"
                )
                disk_space.require(self.directory, _DOWNLOAD + _UNPACKED, name)
            for command in self.commands(python):
                run_installer(command, what, self.directory.parent)
            self._check(echo, versions)
            (self.directory / _DONE).write_text(self.text, "utf-8")

    def _check(self, echo: Echo, versions: dict[str, str]) -> None:
        name = "vllm" if "vllm" in versions else next(iter(versions))
        command = [str(self.python), "-I", "-c", _CHECK, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_S)
        found, _, header = done.stdout.strip().partition("\n")
        if found != versions[name]:
            said = done.stderr.strip().splitlines()[-1:] or [f"has {name} {found}"]
            raise ModelUnavailable(f"{self.python}: {said[0]}; the lock has {versions[name]}")
        if header != "True":
            echo(
                f"[setup] {self.python} has no Python.h, which Triton's compiler needs on a GPU:"
                " install python3.12-dev, or give uv's own Python: --python cpython-3.12"
            )
        if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
            echo("[setup] no C compiler is here, which Triton's compiler needs on a GPU: gcc")


class VLLMInstallation(NamedTuple):
    """A vLLM on this machine: its site-packages, and its Python if that is not ours."""

    site: Path
    python: Path | None


def find_vllm(work_dir: Path) -> VLLMInstallation | None:
    """The vLLM of our own Python, else the environment that `cog-triton setup vllm` made."""
    installed = any(importlib.metadata.distributions(name="vllm"))
    found = importlib.util.find_spec("vllm") if installed else None
    if found is not None and found.origin:
        return VLLMInstallation(Path(found.origin).parents[1], None)
    try:
        environment = VLLMEnvironment.of(work_dir)
    except TritonStartFailed:  # an image has no lock, and sets up nothing
        return None
    if not environment.ready:
        return None
    site = next(environment.directory.glob("lib/python3.*/site-packages"))
    return VLLMInstallation(site, environment.python)
