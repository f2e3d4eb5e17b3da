"""Build job: one build as a process, from the config's address to the uploaded engine.

``python -m cog_triton.builder.job FILE``, the file being the job as JSON, which is removed: unlike
a thread it can be stopped at any point, and what it holds in memory goes with it. Progress is on
stdout; stderr is empty, or ends in the error that ended the build.
"""

from __future__ import annotations

import errno
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

from pydantic import BaseModel, ConfigDict, SecretStr

from cog_triton.builder import config_source, upload
from cog_triton.builder.config import token
from cog_triton.builder.run import planned_any, run_build, stages
from cog_triton.builder.sealed_config import parse_any
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import (
    BuildCancelled,
    BuildStepFailed,
    CogTritonError,
    DiskFull,
    InvalidArgument,
    from_text,
)
from cog_triton.system import isolated_python, reaper
from cog_triton.system.terminal import cancellable
from cog_triton.system.terminal_progress import BuildProgress

# Longer than the grace period of a step: the job must not be killed while its step ends.
GRACE_S = 15.0
_POLL_S = 0.1


class Job(BaseModel):
    """A build to run: config, output, workspace, token and upload URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    """Address of the build config, see `config_source.fetch`."""
    output: Path
    """The engine.tar to write."""
    workspace: Path
    """Where it is built, see `Workspace`; only what the last build made is kept."""
    hf_token: str | None = None
    """Takes the place of the config's own."""
    upload_url: str | None = None
    """Where engine.tar is PUT when it is done."""

    def run(self, echo: Callable[[str], None]) -> None:
        """Run the job; `echo` gets every line of progress. Raises the coded error that ended it."""
        text, name = config_source.fetch(self.config)
        config = parse_any(text, name)
        if self.hf_token is not None:
            try:
                word = token(SecretStr(self.hf_token))
            except ValueError as error:
                raise InvalidArgument(f"hf_token: {error}") from None
            config = config.model_copy(update={"hf_token": word})
        echo(f"[config] {name}")
        for line in config.to_yaml().splitlines():
            echo(f"[config]   {line}")
        workspace = Workspace(self.workspace)
        plan = planned_any(config, workspace.of(config.fingerprint), echo)
        with BuildProgress(echo, len(stages(plan))) as progress:
            run_build(
                plan,
                workspace,
                self.output,
                echo=progress.echo,
                alone=True,
                begin=progress.begin,
            )
        echo(f"[done] {self.output}: {self.output.stat().st_size / 1e6:.0f} MB")
        if self.upload_url is not None:
            upload.put(self.output, self.upload_url, echo)


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
                **isolated_python.environment_of(sys.executable, Path(scratch)),
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


def main(file: Path) -> int:
    """Run the job in `file`; 0, or 1 with the error on stderr."""
    job = Job.model_validate_json(file.read_bytes())
    file.unlink()  # its URLs may be secret
    try:
        with cancellable():
            job.run(lambda line: print(line, flush=True))
    except CogTritonError as error:
        sys.stderr.write(str(error))
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(str(DiskFull(str(error))))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
