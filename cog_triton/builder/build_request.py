"""Build for another program: its request as JSON, from the config's address to the upload."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from cog_triton.builder import config_source, upload
from cog_triton.builder.config import parse_any, token
from cog_triton.builder.run import build_of, built
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import InvalidArgument
from cog_triton.system.printable import first_problem
from cog_triton.system.terminal import cancellable


class BuildRequest(BaseModel):
    """What to build, and where to send it; secrets are in no command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    """Address of the build config, see `config_source.fetch`."""
    hf_token: str | None = None
    """Takes the place of the config's own."""
    upload_url: str | None = None
    """Where engine.tar is PUT when it is done."""


def run_request(text: str, work_dir: Path, output: Path) -> None:
    """Run the `BuildRequest` in `text`, JSON; progress is on stdout, a line each.

    Raises:
        InvalidArgument: it is none.
        CogTritonError: as `run_build` and `upload.put`.
    """
    try:
        request = BuildRequest.model_validate_json(text)
    except ValidationError as error:
        raise InvalidArgument(f"stdin: {first_problem(error)}") from None

    def echo(line: str) -> None:
        print(line, flush=True)

    with cancellable():
        given, name = config_source.fetch(request.config)
        config = parse_any(given, name)
        if request.hf_token is not None:
            try:
                word = token(SecretStr(request.hf_token))
            except ValueError as error:
                raise InvalidArgument(f"hf_token: {error}") from None
            config = config.model_copy(update={"hf_token": word})
        echo(f"[config] {name}")
        for line in config.to_yaml().splitlines():
            echo(f"[config]   {line}")
        built(build_of(config, Workspace(work_dir), echo), output)
        echo(f"[done] {output}: {output.stat().st_size / 1e6:.0f} MB")
        if request.upload_url is not None:
            upload.put(output, request.upload_url, echo)
