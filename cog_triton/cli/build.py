"""``cog-triton build``: build config to engine.tar."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from cog_triton.system.terminal import coded_errors


def build(
    config: Annotated[
        Path | None, typer.Argument(help="Build config, YAML; see configs/build/.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="What to write: a .tar, .tar.gz or .tar.zst."),
    ] = Path("engine.tar"),
    work_dir: Annotated[
        Path,
        typer.Option(help="Where steps run and models are kept; what is found here is used."),
    ] = Path(".work/build"),
    check: Annotated[
        bool, typer.Option("--check", help="Check CONFIG and its arguments, and build nothing.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be run, and build nothing.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run every step, finished ones too.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Remove what builds of CONFIG left in the work directory; without CONFIG, what"
            " all builds left, and downloaded models. Build nothing.",
        ),
    ] = False,
) -> None:
    """Build an engine: convert, quantize and build as CONFIG says, then pack engine.tar.

    Arguments are checked against the options of the scripts before anything runs.
    What is finished is not done again, after a kill either: builds resume.
    --check ends with exit code 2 if the options of a script are not known here.

    Example: cog-triton build configs/build/smollm2-135m-cpu.yaml -o engine.tar
    """
    from cog_triton.builder import command

    echo = typer.echo  # a tenth of what rich takes, and scripts write many lines

    with coded_errors():
        if clean:
            command.clean(config, work_dir, echo)
            return
        if config is None:
            raise typer.BadParameter(
                "name a build config, as in configs/build/", param_hint="CONFIG"
            )
        if check or plan:
            if not command.look(config, work_dir, output, echo, check=check, plan=plan):
                raise typer.Exit(2)
            return
        command.build(config, work_dir, output, echo, cache=not no_cache)
        echo(
            f"Built {output} ({output.stat().st_size / 1e6:.0f} MB)."
            f" Serve it: cog-triton serve {shlex.quote(str(output))}"
        )
