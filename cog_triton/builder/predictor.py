"""Cog predictor of the builder: takes a build config, returns the address of engine.tar."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import IO

import cog
from cog import BaseRunner, Input, Secret

from cog_triton.builder import upload
from cog_triton.errors import BuildCancelled, BuildStepFailed, InvalidArgument, from_text
from cog_triton.settings import BuildSettings, load_group
from cog_triton.system import isolated_python, reaper
from cog_triton.system.process_state import exit_with_parent
from cog_triton.system.redaction import redact_url

ENGINE_NAME = "engine.tar"
# Longer than the grace period of a step: the build must not be killed while its step ends.
GRACE_S = 15.0
_POLL_S = 0.1


class Predictor(BaseRunner):  # type: ignore[misc]
    """Cog predictor that builds one engine at a time; progress is the prediction's log.

    It returns text and no `cog.Path` unless Cog uploads files: it would make base64 of the whole
    file, in memory.
    """

    def setup(self) -> None:
        """Read the settings; an exception here is /health-check's SETUP_FAILED."""
        exit_with_parent()
        settings = load_group(BuildSettings)
        self._output = output_dir(settings) / ENGINE_NAME
        self._runner = BuildRunner(settings.work_dir / "build", self._output)

    def run(
        self,
        config: str = Input(
            description="Build config, YAML: its http(s):// URL, its path or file:// URL on the"
            " builder's machine, a data: URL that holds it, or its text of more than one line.",
            min_length=1,
        ),
        hf_token: Secret | None = Input(  # noqa: B008
            default=None,
            description="Hugging Face token, for gated and private models. It takes the place of"
            " the config's and is kept out of logs, errors and engine.tar.",
        ),
        upload_url: str | None = Input(
            default=None,
            description="Where engine.tar is sent with an HTTP PUT when it is built, for example"
            " a presigned URL. Its query is kept out of logs and output.",
        ),
    ) -> str:  # or a cog.Path, which is text as well once Cog has uploaded it
        """Build, and return upload_url without its query, or else the path of engine.tar.

        The path is the same for every build: the next one writes there, too. A Cog that uploads
        files itself gets the file, and returns its URL.
        """
        if upload_url:
            upload.check(upload_url)
        given = {
            "config": config,
            "hf_token": (hf_token.get_secret_value() or None) if hf_token else None,
            "upload_url": upload_url or None,
        }
        self._runner.run(given, lambda line: print(line, flush=True))
        if upload_url:
            return redact_url(upload_url)
        return cog.Path(self._output) if uploads_files(os.getppid()) else str(self._output)


def uploads_files(server: int) -> bool:
    """Whether the Cog server with the process id `server` was started with an upload URL.

    It tells its predictors in no other way.
    """
    words = Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
    return any(word.split(b"=")[0] == b"--upload-url" for word in words)


def output_dir(settings: BuildSettings) -> Path:
    """COG_TRITON_OUTPUT_DIR, else the working directory (``/src`` in an image).

    Raises:
        InvalidArgument: it cannot be written to, which is better known before a build than after.
    """
    directory = (settings.cog_triton_output_dir or Path.cwd()).resolve()
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise InvalidArgument(
            f"COG_TRITON_OUTPUT_DIR={str(directory)!r}: must be a directory that can be written to"
        )
    return directory


class BuildRunner:
    """Runner of builds in `work_dir` to `output`, one at a time, each in a child process.

    Cog cancels a prediction by raising an exception in its thread, between any two instructions
    and perhaps twice, so that no clean-up there is safe. The build is started, watched and stopped
    by a thread of our own; unlike a thread, a process can be stopped at any point.
    """

    def __init__(self, work_dir: Path, output: Path) -> None:
        words = ("--porcelain", "--work-dir", str(work_dir), "--output", str(output))
        self._command = (sys.executable, "-m", "cog_triton", "build", *words)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="build")

    def run(self, request: Mapping[str, str | None], echo: Callable[[str], None]) -> None:
        """Run a `BuildRequest`; `echo` gets its lines, and the reason if it was cancelled.

        An exception raised in the calling thread stops the build first: it, its steps and all that
        they started are gone when this returns. Raises the build's own error, or BuildStepFailed.
        """
        cancel = threading.Event()
        future = self._thread.submit(self._run, json.dumps(request), echo, cancel)
        try:
            while not future.done():
                wait([future], _POLL_S)
        finally:
            cancel.set()
            wait([future])
        future.result()

    def _run(self, request: str, echo: Callable[[str], None], cancel: threading.Event) -> None:
        with (
            tempfile.TemporaryDirectory() as scratch,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as errors,
        ):
            given.write(request.encode())
            given.seek(0)
            process = reaper.spawn(
                self._command,
                grace=GRACE_S,
                env={
                    "BUILD_CACHE_BYTES": "0",  # builds of other configs do not fill the disk
                    **isolated_python.environment_of(sys.executable, Path(scratch)),
                    "PYTHONIOENCODING": "utf-8",
                },
                stdin=given,
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
            text = errors.read().decode("utf-8", "replace").strip().removeprefix("error: ")
        code, error = process.wait(), from_text(text)
        if cancel.is_set() and code != 0:
            echo(str(error or BuildCancelled("the build was interrupted")))
        elif code != 0:
            raise error or BuildStepFailed(f"the builder ended with exit code {code}:\n{text}")
        elif text:
            echo(text)


def _echo_lines(source: IO[bytes] | None, echo: Callable[[str], None]) -> None:
    assert source is not None
    with io.TextIOWrapper(source, "utf-8", errors="replace") as lines:
        for line in lines:
            echo(line.rstrip("\n"))
