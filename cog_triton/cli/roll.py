"""``cog-triton roll``: replace the engine of a running server without a refused request."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cog_triton.cli.engine_choice import prepared, say
from cog_triton.system.terminal import coded_errors
from cog_triton.system.terminal_progress import ProgressLine

if TYPE_CHECKING:
    from cog_triton.door.control import Command, Progress

_PROJECT = (
    "import sys; from cog_triton.system.paths import cog_project; print(cog_project(sys.argv[1]))"
)
_INTERRUPTED = 130


def roll(
    engine: Annotated[
        str | None,
        typer.Argument(
            help="The new engine, as `cog-triton serve` takes it: engine.tar (path, URL or"
            " oci://REF), engine directory, Hugging Face model, directory of safetensors or .gguf"
            " file; without it the same engine again, as with --python or --config."
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(envvar="PORT", help="Cog's HTTP port of the running server.", min=1),
    ] = 5000,
    family: Annotated[
        str | None,
        typer.Option(
            help="Engine family for a model: openvino or vllm.", show_default="by machine"
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with another version of cog-triton."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Serve config, YAML, in place of the server's own."),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            envvar="SERVED_MODEL_NAME",
            help="Name of the model in the OpenAI API from now on.",
            show_default="the old one, which clients ask for",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Try it even where memory for both engines is short.")
    ] = False,
) -> None:
    """Roll a running server to another engine, or version, without a refused request.

    The new engine is started beside the old one and probed, with the canary of its engine.tar too.
    Then all new requests go to it, on the same ports, while those that run end on the old one
    (DRAIN_TIMEOUT), which is stopped. If anything fails before the switch, or with Ctrl-C, the new
    one is stopped, and the old one has noticed nothing; the exit code is 1 then. Run it on the
    server's machine, in its container if it has one, as the same user.

    Example: cog-triton roll engine-v2.tar

    Example: docker exec SERVER cog-triton roll https://example.com/engine-v2.tar

    Example: cog-triton roll --python /opt/cog-triton-2/bin/python
    """
    with coded_errors():
        from cog_triton.door.control import Command, ask

        (status,) = ask(port, Command(command="status"))
        command = _command(status, engine, family, python, config, force=force)
        name = {"SERVED_MODEL_NAME": served_model_name or ""}
        command = command.model_copy(update={"environment": {**command.environment, **name}})
        try:
            with ProgressLine() as line:
                line.begin("rolling")
                for answer in ask(port, command):
                    say(answer.say)
        except KeyboardInterrupt:
            say("Stopped; before the switch the old engine serves on, after it the new one")
            raise typer.Exit(_INTERRUPTED) from None


def _command(
    status: Progress,
    engine: str | None,
    family: str | None,
    python: Path | None,
    config: Path | None,
    *,
    force: bool,
) -> Command:
    """The roll that is asked of the server, once the engine is fetched and converted."""
    from cog_triton.artifact.engine_manifest import engine_bytes
    from cog_triton.door.control import Command
    from cog_triton.errors import InvalidArgument
    from cog_triton.models.model_name import recognize
    from cog_triton.serving.cog_process import engine_environment
    from cog_triton.settings import load_settings

    if family and not engine:
        raise InvalidArgument("--family: goes with a model that is named, ENGINE")
    environment: dict[str, str] = {}
    size = None
    if engine:
        name = recognize(engine)
        settings = load_settings(
            cog_weights=engine, cog_triton_engine=None, cog_triton_work_dir=status.work_dir
        )
        environment = engine_environment(prepared(settings, name, family, False, None))
        size = engine_bytes(environment["COG_WEIGHTS"])
    if config is not None:
        environment["COG_TRITON_CONFIG"] = str(config.resolve())
    directory = None
    if python is not None or (engine and status.mock):
        directory = _project(python, mock=status.mock and not engine)
    return Command(
        command="roll",
        label=engine or "the same engine",
        environment=environment,
        python=python.absolute() if python else None,
        directory=directory,
        engine_bytes=size,
        force=force,
    )


def _project(python: Path | None, *, mock: bool) -> Path:
    """Cog project of this package, or of the one that `python` has; E1005 if it has none."""
    from cog_triton.errors import InvalidArgument
    from cog_triton.system.paths import cog_project

    kind: Literal["mock_cog_triton", "runner"] = "mock_cog_triton" if mock else "runner"
    if python is None:
        return cog_project(kind)
    try:
        asked = subprocess.run(
            [str(python.absolute()), "-c", _PROJECT, kind],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise InvalidArgument(
            f"--python {python}: must be a Python that has cog-triton: {lines[-1]}"
        ) from None
    return Path(asked.stdout.strip())
