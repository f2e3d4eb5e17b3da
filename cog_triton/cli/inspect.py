"""``cog-triton inspect``: describe an engine and verify its checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cog_triton.errors import EngineIncompatible
from cog_triton.system.terminal import coded_errors, err


def inspect_engine(
    engine: Annotated[
        Path, typer.Argument(help="engine.tar (or .tar.gz, .tar.zst) or a directory.")
    ],
    check_gpu: Annotated[
        bool, typer.Option("--check-gpu", help="Fail unless it fits the GPUs of this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Describe ENGINE and the GPU it is for, and verify every file's checksum.

    Nothing is unpacked. An engine that is damaged, incomplete or none at all ends
    in E1306 and exit code 1, one for another GPU (--check-gpu) in E1305. A tar
    without manifest, as older builders made, is described by its config.json.

    Example: cog-triton inspect --check-gpu engine.tar
    """
    from cog_triton.inspection import engine_contents, engine_description, gpu_check, report
    from cog_triton.system.gpus import visible_gpus

    with coded_errors():
        with err.status("Reading every byte of it"):
            found = engine_description.describe(engine_contents.read(engine))
        fit = gpu_check.check(found, visible_gpus()) if check_gpu else None
        if as_json:
            typer.echo(report.as_json(found, fit))
        else:
            Console(highlight=False, emoji=False).print(report.as_table(found, fit))
        if fit and fit.problem:
            raise EngineIncompatible(fit.problem)
