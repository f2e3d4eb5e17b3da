"""``cog-triton doctor``: check this machine, and say what to do about failures."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def doctor(
    engine: Annotated[
        str | None,
        typer.Argument(
            help="Engine or model to compare with this machine: all that serve takes.",
            show_default="COG_WEIGHTS or ENGINE_DIR",
        ),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="IMAGE|ENGINE|MODEL",
            help="Check whether an image of a registry (REGISTRY/NAME:TAG), or an engine or a model"
            " as above, fits here, before it is fetched.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check what this machine can run, with advice for each problem.

    Ends with exit code 1 if something is missing that serving needs. Nothing is started,
    changed or fetched; of an engine or model, only what describes it is read. For a
    model, memory is summed: does it fit here, with which quantization, and what would.

    With --for only what it would run on is checked, against NVIDIA's driver, the GPUs,
    their free memory and the disk: a machine that shall pull an image needs no Triton.
    An image that Nix built (result) or that docker holds is asked for at a registry,
    once it was pushed.

    Examples: cog-triton doctor engine.tar; cog-triton doctor Qwen/Qwen3-8B

    Example: cog-triton doctor --for ghcr.io/me/cog-triton-runner-90:v1

    Example: cog-triton doctor --for oci://ghcr.io/me/llama-sm90:v1 --json
    """
    from cog_triton.doctor import report, run_checks

    if engine and before:
        raise typer.BadParameter("goes in place of ENGINE", param_hint="--for")
    checks = run_checks.run(engine, before)
    if as_json:
        typer.echo(report.as_json(checks))
    else:
        report.print_to(Console(highlight=False, emoji=False), checks)
    if not report.healthy(checks):
        raise typer.Exit(1)
