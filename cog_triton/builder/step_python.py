"""Python of the build's steps, run for a short answer: JSON on the last line of its stdout."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from cog_triton.builder import script_environment
from cog_triton.errors import BuildStepFailed
from cog_triton.settings import load_settings


def ask(arguments: list[str], what: str, timeout: float) -> str:
    """The last line that it prints, run with `arguments`.

    Raises:
        BuildStepFailed: it ended with an error, or not within `timeout` seconds; says that it does
            not tell `what`, and its stderr.
    """
    python = str(load_settings().cog_triton_step_python or sys.executable)
    with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
        try:
            done = subprocess.run(
                [python, *arguments],
                env=script_environment.environment_of(python, Path(scratch)),
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
