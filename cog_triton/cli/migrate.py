"""``cog-triton migrate``: build config to vLLM's."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cog_triton.errors import InvalidArgument
from cog_triton.system.terminal import tagged


def migrate(
    config: Annotated[Path, typer.Argument(help="Build config, YAML; old ones, too.")],
    serve_config: Annotated[
        Path | None,
        typer.Option("--serve-config", help="Serve config, whose tensorrt_llm.args come along."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory, or the file itself; - prints it.",
            show_default="CONFIG-vllm",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End in exit code 2 if anything is lost.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Take a model from TensorRT engines to vLLM.

    From a build config, ours or the original's, this writes model.json, which cog-triton
    serve takes with its directory, and prints a line for every option: what carries over,
    what changes its meaning, what is lost, and why. Nothing is downloaded, and no engine or
    GPU is needed.

    Exit codes: 0 written, 1 refused, 2 written and something is lost (--strict).

    Examples:

      cog-triton migrate configs/build/qwen3-8b.yaml

      cog-triton migrate qwen.yaml --serve-config serve.yaml -o qwen
    """
    from cog_triton.builder import migration
    from cog_triton.builder.config import SealedConfig, load_any
    from cog_triton.cli.init import write_output
    from cog_triton.triton.serve_config import load_serve_config

    settings = load_serve_config(serve_config).arguments_of("tensorrt_llm") if serve_config else {}
    given = load_any(config)
    if isinstance(given, SealedConfig):
        raise InvalidArgument(f"{config}: is a build config of vLLM: there is nothing to migrate")
    found = migration.migrate(given, settings)
    text = migration.text_of(found)
    path = None
    if str(output) != "-":
        path = migration.path_of(output or Path(f"{config.stem}-vllm"))
        write_output(path, text, force=force)
    if as_json:
        content = {
            "path": None if path is None else str(path),
            "arguments": found.arguments,
            "findings": [asdict(finding) for finding in found.findings],
        }
        typer.echo(json.dumps(content, indent=2, default=str))
    else:
        aside = path is None  # the file itself goes to stdout
        for verdict in migration.VERDICTS:
            for finding in found.findings:
                if finding.verdict == verdict:
                    typer.echo(tagged(f"[{verdict}] {finding}"), err=aside)
        verdicts = migration.VERDICTS.items()
        counts = ", ".join(f"{found.count(verdict)} {words}" for verdict, words in verdicts)
        if path is None:
            typer.echo(counts, err=True)
            sys.stdout.write(text)
        else:
            typer.echo(f"Wrote {path}: {counts}.")
            typer.echo(f"Serve it: cog-triton serve {shlex.quote(str(path.parent))}")
    if strict and found.count("lost"):
        raise typer.Exit(2)
