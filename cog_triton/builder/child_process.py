"""Runs a build job for a thread that may be interrupted anywhere, and lets nothing of it slip."""

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

from cog_triton.builder import script_environment
from cog_triton.builder.job import GRACE_S, Job
from cog_triton.errors import BuildCancelled, BuildStepFailed, CogTritonError, from_text
from cog_triton.system import reaper

_POLL_S = 0.1


class Attendant:
    """Runs jobs, one after another.

    Cog cancels a prediction by raising an exception in its thread, between any two instructions
    and perhaps twice, so that no clean-up there is safe. The job is started, watched and stopped
    by a thread that Cog does not know.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="build")

    def run(self, job: Job, echo: Callable[[str], None]) -> None:
        """Run `job` to its end; `echo` gets its lines, and why it ended if it was interrupted.

        An exception raised in the calling thread stops the job first: it, its steps and all that
        they started are gone when this returns. Raises the job's own error, or BuildStepFailed.
        """
        leave = threading.Event()
        future = self._thread.submit(_attend, job, echo, leave)
        try:
            while not future.done():
                wait([future], _POLL_S)
        finally:
            leave.set()
            wait([future])
        future.result()


def _attend(job: Job, echo: Callable[[str], None], leave: threading.Event) -> None:
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as errors:
        file = Path(scratch, "job.json")
        file.write_text(job.model_dump_json(), "utf-8")
        process = reaper.spawn(
            [sys.executable, "-m", "cog_triton.builder.job", str(file)],
            grace=GRACE_S,
            env={
                **script_environment.of_scripts(sys.executable, Path(scratch)),
                "PYTHONIOENCODING": "utf-8",
            },
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        relay = threading.Thread(target=_relay, args=(process.process.stdout, echo), daemon=True)
        relay.start()
        try:
            while process.poll() is None and not leave.wait(_POLL_S):
                pass
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        finally:
            process.kill()
            relay.join()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip()
    code = process.wait()
    if leave.is_set() and code != 0:
        echo(str(from_text(said) or BuildCancelled("the build was interrupted")))
    elif code != 0:
        raise _error(code, said)
    elif said:
        echo(said)


def _error(code: int, said: str) -> CogTritonError:
    return from_text(said) or BuildStepFailed(f"the builder ended with exit code {code}:\n{said}")


def _relay(source: IO[bytes] | None, echo: Callable[[str], None]) -> None:
    assert source is not None
    with io.TextIOWrapper(source, "utf-8", errors="replace") as lines:
        for line in lines:
            echo(line.rstrip("\n"))
