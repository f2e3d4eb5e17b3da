"""Python of the build's steps: its environment, and short answers to the builder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import cog_triton
from cog_triton.errors import BuildStepFailed
from cog_triton.settings import load_group
from cog_triton.settings.programs import BuilderSettings
from cog_triton.system import isolated_python


def environment_of(python: str, cwd: Path) -> dict[str, str]:
    """Environment for `python`: ours, with this package importable and output unbuffered.

    Another Python than ours has packages of its own, and gets this package alone, through a
    link in `cwd`.
    """
    if python != sys.executable:
        return {**isolated_python.environment(cwd / "python"), "PYTHONUNBUFFERED": "1"}
    root = str(Path(cog_triton.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def ask(arguments: list[str], what: str, timeout: float) -> str:
    """The last line that it prints, run with `arguments`.

    Raises:
        BuildStepFailed: it ended with an error, or not within `timeout` seconds; says that it does
            not tell `what`, and its stderr.
    """
    python = str(load_group(BuilderSettings).cog_triton_step_python or sys.executable)
    with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
        try:
            done = subprocess.run(
                [python, *arguments],
                env=environment_of(python, Path(scratch)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=True,
            )
            return done.stdout.splitlines()[-1]
        except (OSError, IndexError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or ""
            raise BuildStepFailed(
                f"{python} does not tell {what}: {error} {told}".rstrip()
            ) from error
