"""``cog-triton inspect``: describe an engine and verify its checksums."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.console import Console

from cog_triton.errors import EngineIncompatible
from cog_triton.system.printable import printable
from cog_triton.system.terminal import err


def inspect_engine(
    engine: Annotated[
        str,
        typer.Argument(
            help="engine.tar (or .tar.gz, .tar.zst; path, URL or oci://REF), engine directory, or a"
            " model: ORG/NAME[@REVISION], directory or .gguf file."
        ),
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

    Of an engine in a registry only the small files that describe it are fetched,
    and checksums are the manifest's. Of a tar behind a URL the first 32 MiB are
    read. A model is described by its config.json.

    Example: cog-triton inspect --check-gpu engine.tar

    Example: cog-triton inspect oci://ghcr.io/me/llama-sm90:v1
    """
    from cog_triton.inspection.description import as_table, describe
    from cog_triton.settings import load_settings
    from cog_triton.sources.source import Network, Source
    from cog_triton.system.gpus import visible_gpus

    plain = load_settings().plain_http_registries
    network = Network(lambda line: err.print(printable(line), markup=False), plain)
    source = Source.open(engine, network)
    with err.status("Reading every byte of it") if source.path else nullcontext():
        found = describe(source)
    facts = found.facts(visible_gpus() if check_gpu else None)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        Console(highlight=False, emoji=False).print(as_table(found, facts))
    if check_gpu and (problem := facts["gpu_check"]["problem"]):
        raise EngineIncompatible(problem)
