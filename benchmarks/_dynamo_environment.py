"""Python environment with NVIDIA Dynamo, made from requirements/dynamo.lock where there is none."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cog_triton.settings import load_settings

LOCK = Path(__file__).parents[1] / "requirements" / "dynamo.lock"
_TIMEOUT_S = 600


class EnvironmentFailed(Exception):
    """No environment could be made; the message is one line."""


def interpreter(lock: Path = LOCK) -> Path:
    """Python that has what `lock` pins, from the cache if it was made before.

    It is in the work directory (COG_TRITON_WORK_DIR), where a lock and a Python have one for
    themselves. Raises EnvironmentFailed where pip cannot get the packages.
    """
    made_for = f"{sys.version}\n{sys.executable}\n{lock.read_text()}"
    digest = hashlib.sha256(made_for.encode()).hexdigest()[:12]
    directory = load_settings().work_dir / "benchmarks" / f"{lock.stem}-{digest}"
    python, stamp = directory / "bin" / "python", directory / "made"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not stamp.is_file():
            shutil.rmtree(directory, ignore_errors=True)
            run([sys.executable, "-m", "venv", "--without-pip", str(directory)])
            install = [sys.executable, "-m", "pip", "--python", str(python), "install"]
            install += ["--no-deps", "--require-hashes"]
            run([*install, "--only-binary", ":all:", "-r", str(lock)])
            stamp.touch()
    return python


def run(command: list[str]) -> None:
    """Run a command quietly; raises EnvironmentFailed with the last error that it told."""
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFailed(f"{Path(command[0]).name}: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise EnvironmentFailed((errors or lines or [f"exit status {done.returncode}"])[-1])
