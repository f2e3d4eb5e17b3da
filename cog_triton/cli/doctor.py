"""``cog-triton doctor``: check this machine, and say what to do about failures."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def doctor(
    engine: Annotated[
        str | None,
        typer.Argument(
            help="engine.tar, engine directory or model (ORG/NAME) to compare with this machine.",
            show_default="COG_WEIGHTS or ENGINE_DIR",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check what this machine can run, with advice for each problem.

    Ends with exit code 1 if something is missing that serving needs. Nothing is started,
    changed or fetched; of an engine or model, only what describes it is read. For a
    model, memory is summed: does it fit here, with which quantization, and what would.

    Examples: cog-triton doctor engine.tar; cog-triton doctor Qwen/Qwen3-8B
    """
    from cog_triton.doctor import report, run_checks

    checks = run_checks.run(engine)
    if as_json:
        typer.echo(report.as_json(checks))
    else:
        report.print_to(Console(highlight=False, emoji=False), checks)
    if not run_checks.healthy(checks):
        raise typer.Exit(1)
