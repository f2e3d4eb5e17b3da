"""Cog predictor of the builder: takes a build config, returns the address of engine.tar."""

from __future__ import annotations

import os
from pathlib import Path

import cog
from cog import BaseRunner, Input, Secret

from cog_triton.builder import upload
from cog_triton.builder.job import Job, JobRunner
from cog_triton.errors import InvalidArgument
from cog_triton.settings import BuildSettings, load_group
from cog_triton.system.process_state import exit_with_parent
from cog_triton.system.redaction import redact_url

ENGINE_NAME = "engine.tar"


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
        self._workspace = settings.work_dir / "build"
        self._runner = JobRunner()

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
        job = Job(
            config=config,
            output=self._output,
            workspace=self._workspace,
            hf_token=(hf_token.get_secret_value() or None) if hf_token else None,
            upload_url=upload_url or None,
        )
        self._runner.run(job, lambda line: print(line, flush=True))
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
