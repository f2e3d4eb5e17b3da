"""``cog-triton build``: build config to engine.tar."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from cog_triton.system.terminal import coded_errors, tagged


def build(
    config: Annotated[
        Path | None, typer.Argument(help="Build config, YAML; see configs/build/.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="File to write: .tar, .tar.gz or .tar.zst."),
    ] = Path("engine.tar"),
    work_dir: Annotated[
        Path,
        typer.Option(help="Directory of steps and models; finished ones are reused."),
    ] = Path(".work/build"),
    check: Annotated[
        bool, typer.Option("--check", help="Check CONFIG and its arguments; build nothing.")
    ] = False,
    against_installed: Annotated[
        bool,
        typer.Option(
            "--against-installed",
            help="With --check: read the options from the scripts that are installed, which"
            " imports TensorRT-LLM and takes up to half a minute, not from what is recorded.",
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the commands to run; build nothing.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run every step again, finished ones too.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Remove CONFIG's builds from the work directory; without CONFIG, all builds and"
            " downloaded models. Build nothing.",
        ),
    ] = False,
) -> None:
    """Build an engine: convert, quantize and build as CONFIG says, then pack engine.tar.

    Arguments are checked against the options of the scripts before anything runs.
    Finished steps are skipped, so that an interrupted build resumes.
    --check ends with exit code 2 if the options of a script are not known here.

    Example: cog-triton build configs/build/smollm2-135m-cpu.yaml -o engine.tar
    """
    from cog_triton.builder import command

    def echo(line: str) -> None:
        print(tagged(line), flush=True)  # scripts write many lines, rich would be slow

    with coded_errors():
        if clean:
            command.clean(config, work_dir, echo)
            return
        if config is None:
            raise typer.BadParameter(
                "name a build config, as in configs/build/", param_hint="CONFIG"
            )
        if check or plan or against_installed:
            if not command.look(
                config,
                work_dir,
                output,
                echo,
                check=check or against_installed,
                plan=plan,
                against_installed=against_installed,
            ):
                raise typer.Exit(2)
            return
        elapsed = command.build(config, work_dir, output, echo, cache=not no_cache)
        echo(
            f"Built {output} ({output.stat().st_size / 1e6:.0f} MB) in {elapsed}."
            f" Serve it: cog-triton serve {shlex.quote(str(output))}"
        )
