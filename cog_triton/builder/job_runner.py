"""Runs a build in a child process; cancels cleanly when Cog interrupts the thread."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import IO

from cog_triton.builder import step_python
from cog_triton.builder.job import GRACE_S, Job
from cog_triton.errors import BuildCancelled, BuildStepFailed, CogTritonError, from_text
from cog_triton.system import reaper

_POLL_S = 0.1


class JobRunner:
    """Runner of build jobs, one at a time, each in a child process.

    Cog cancels a prediction by raising an exception in its thread, between any two instructions
    and perhaps twice, so that no clean-up there is safe. The job is started, watched and stopped
    by a thread of our own.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="build")

    def run(self, job: Job, echo: Callable[[str], None]) -> None:
        """Run `job` to its end; `echo` gets its lines, and the reason if it was cancelled.

        An exception raised in the calling thread stops the job first: it, its steps and all that
        they started are gone when this returns. Raises the job's own error, or BuildStepFailed.
        """
        cancel = threading.Event()
        future = self._thread.submit(_run_job, job, echo, cancel)
        try:
            while not future.done():
                wait([future], _POLL_S)
        finally:
            cancel.set()
            wait([future])
        future.result()


def _run_job(job: Job, echo: Callable[[str], None], cancel: threading.Event) -> None:
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as errors:
        file = Path(scratch, "job.json")
        file.write_text(job.model_dump_json(), "utf-8")
        process = reaper.spawn(
            [sys.executable, "-m", "cog_triton.builder.job", str(file)],
            grace=GRACE_S,
            env={
                **step_python.environment_of(sys.executable, Path(scratch)),
                "PYTHONIOENCODING": "utf-8",
            },
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        reader = threading.Thread(
            target=_echo_lines, args=(process.process.stdout, echo), daemon=True
        )
        reader.start()
        try:
            while process.poll() is None and not cancel.wait(_POLL_S):
                pass
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        finally:
            process.kill()
            reader.join()
        errors.seek(0)
        error_text = errors.read().decode("utf-8", "replace").strip()
    code = process.wait()
    if cancel.is_set() and code != 0:
        echo(str(from_text(error_text) or BuildCancelled("the build was interrupted")))
    elif code != 0:
        raise _error(code, error_text)
    elif error_text:
        echo(error_text)


def _error(code: int, error_text: str) -> CogTritonError:
    return from_text(error_text) or BuildStepFailed(
        f"the builder ended with exit code {code}:\n{error_text}"
    )


def _echo_lines(source: IO[bytes] | None, echo: Callable[[str], None]) -> None:
    assert source is not None
    with io.TextIOWrapper(source, "utf-8", errors="replace") as lines:
        for line in lines:
            echo(line.rstrip("\n"))
