"""Package installer: uv or pip, whichever is here, with the indexes that it is set up for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cog_triton.errors import DiskFull, MissingExtra, ModelUnavailable
from cog_triton.system import reaper
from cog_triton.system.isolated_python import OWN_PACKAGES

_GRACE_S = 2.0
_LINES = 12
_FULL = "No space left on device"


def find_uv() -> str | None:
    """Path of uv: the one that runs us (uvx), PATH's, our environment's, or one that we fetched."""
    beside = Path(sys.executable).parent / "uv"
    fetched = [Path(entry) for entry in sys.path if (Path(entry) / OWN_PACKAGES).exists()]
    places = (
        *(os.environ.get("UV"), shutil.which("uv"), str(beside)),
        *(str(directory / "bin" / "uv") for directory in fetched),
    )
    return next((path for path in places if path and os.access(path, os.X_OK)), None)


def install_command(lock: Path, target: Path, what: str) -> list[str]:
    """Command that installs exactly the wheels of `lock`, which are `what`, into `target`.

    Raises:
        MissingExtra: there is neither uv nor pip.
    """
    chosen = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(lock)]
    if (uv := find_uv()) is not None:
        python = ["--python", sys.executable]
        return [uv, "pip", "install", *python, "--target", str(target), *chosen]
    if importlib.util.find_spec("pip") is None:
        raise MissingExtra(
            f"{what} is to be fetched, and neither uv nor pip is here: put uv in PATH, or run"
            f" {sys.executable} -m ensurepip"
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    return [*pip, "install", "--no-compile", "--target", str(target), *chosen]


def run_installer(
    command: Sequence[str], what: str, cwd: Path, env: Mapping[str, str] | None = None
) -> None:
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
        env={**os.environ, **(env or {}), "PIP_ROOT_USER_ACTION": "ignore"},
        stdout=None if on_terminal else subprocess.PIPE,
        stderr=None if on_terminal else subprocess.STDOUT,
    )
    output = process.process.stdout
    text = ""
    try:
        if output is not None:
            with output:
                text = output.read().decode("utf-8", "replace")
        code = process.wait()
    finally:
        if process.poll() is None:  # interrupted
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
    if code:
        said = "\n".join(text.strip().splitlines()[-_LINES:]) or f"{Path(command[0]).name} says why"
        failed = DiskFull if _FULL in text else ModelUnavailable
        raise failed(f"{what} cannot be fetched (exit code {code}):\n{said}")
