"""``cog-triton prune``: removal of device code for other GPUs; image builds run it by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cog_triton.system.printable import printable
from cog_triton.system.terminal import coded_errors, err, escape


def prune(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Shared objects, or directories.")
    ],
    sm: Annotated[
        str,
        typer.Option(
            "--sm", help="Compute capability of the GPU, or of several: 86, sm_86, 8.6 or 80,86."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Copy each PATH in here and prune the copy."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Write nothing, print what would be freed.")
    ] = False,
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Also zero other GPUs' cubins in plain data, as of TensorRT-LLM."
        ),
    ] = False,
    all_licences: Annotated[
        bool,
        typer.Option("--all-licences", help="Also libraries not known to be open source."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Files at once.", show_default="CPUs")
    ] = None,
) -> None:
    """Zero the device code of all GPUs but those of --sm in shared objects.

    In place or, with --output, in copies. A library is replaced as a whole or
    left as it was; doing it again changes nothing. The zeros shrink compressed
    layers (pull, push, registry), not the unpacked files. PyTorch, TensorRT-LLM,
    vLLM and what is built on them are pruned; other device code is only listed.

    Example: cog-triton prune --sm 86 --dry-run .venv/lib
    """
    from cog_triton_prune import report
    from cog_triton_prune.command import run
    from cog_triton_prune.gpu_arch import parse_sms
    from cog_triton_prune.prune_file import Options

    with coded_errors():
        options = Options(parse_sms(sm), dry_run, embedded, all_licences)
        result = run(paths, options, output, jobs)
    if as_json:
        typer.echo(report.as_json(result))
    else:
        Console(highlight=False, emoji=False).print(report.as_table(result))
    refused = [outcome for outcome in result.outcomes if outcome.action == "refused"]
    for outcome in refused:
        err.print(f"[bold red]error:[/] {escape(printable(outcome.reason))}")
    if refused:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(prune)
