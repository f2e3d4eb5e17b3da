"""Build job: one build as a process, from the config's address to the uploaded engine.

``python -m cog_triton.builder.job FILE``, the file being the job as JSON, which is removed: unlike
a thread it can be stopped at any point, and what it holds in memory goes with it. Progress is on
stdout; stderr is empty, or ends in the error that ended the build.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr

from cog_triton.builder import config_source, upload
from cog_triton.builder.command import planned
from cog_triton.builder.config import parse_config, token
from cog_triton.builder.run import run_build, stages
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import CogTritonError, DiskFull, InvalidArgument
from cog_triton.system.terminal import cancellable
from cog_triton.system.terminal_progress import BuildProgress

# Longer than the grace period of a step: the job must not be killed while its step ends.
GRACE_S = 15.0


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
        config = parse_config(text, name)
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
        plan = planned(config, workspace, echo)
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
