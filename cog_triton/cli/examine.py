"""``cog-triton inspect`` and ``doctor``: describe an engine, and compare it with this machine."""

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
