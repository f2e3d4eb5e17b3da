"""``cog-triton inspect``: describe an engine and verify its checksums."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cog_triton.errors import EngineIncompatible
from cog_triton.system.printable import printable
from cog_triton.system.terminal import coded_errors, err

if TYPE_CHECKING:
    from cog_triton.inspection.engine_contents import EngineContents


def inspect_engine(
    engine: Annotated[
        str,
        typer.Argument(help="engine.tar (or .tar.gz, .tar.zst), a directory, or oci://REF."),
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

    Of an engine in a registry only the small files that describe it are fetched.
    The weights stay there unread, and their checksums are the manifest's.

    Example: cog-triton inspect --check-gpu engine.tar

    Example: cog-triton inspect oci://ghcr.io/me/llama-sm90:v1
    """
    from cog_triton.inspection import engine_description, report
    from cog_triton.system.gpus import visible_gpus

    with coded_errors():
        found = engine_description.describe(_contents(engine))
        fit = engine_description.check_gpus(found, visible_gpus()) if check_gpu else None
        if as_json:
            typer.echo(report.as_json(found, fit))
        else:
            Console(highlight=False, emoji=False).print(report.as_table(found, fit))
        if fit and fit.problem:
            raise EngineIncompatible(fit.problem)


def _contents(engine: str) -> EngineContents:
    from cog_triton.inspection import engine_contents
    from cog_triton.oci.reference import Reference, is_oci

    if not is_oci(engine):
        with err.status("Reading every byte of it"):
            return engine_contents.read(Path(engine))
    from cog_triton.inspection import registry_contents
    from cog_triton.settings import load_settings

    return registry_contents.read(
        Reference.parse(engine),
        lambda line: err.print(printable(line), markup=False),
        plain_http=load_settings().plain_http_registries,
    )
