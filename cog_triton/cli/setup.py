"""``cog-triton setup``: environments of engines that come apart from this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cog_triton.system.terminal import cancellable


def setup(
    what: Annotated[Literal["vllm"], typer.Argument(help="What to set up: vllm.")],
    python: Annotated[
        str, typer.Option(help="Python to make it of: a version or path that uv understands.")
    ] = "3.12",
    lock: Annotated[
        Path | None, typer.Option(help="Lock to install, in place of the package's own.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be run; set nothing up.")
    ] = False,
    without_gpu: Annotated[
        bool, typer.Option("--without-gpu", help="Set it up though no GPU is here.")
    ] = False,
) -> None:
    """Set up vLLM for this machine's GPU: its own environment, by uv, from a hashed lock.

    It lies in the cache (COG_TRITON_WORK_DIR), some 3 GB to download and 8 GB on disk, and
    cog-triton serve finds it there. An interrupted set-up goes on where it ended.

    Example: cog-triton setup vllm
    """
    from cog_triton.errors import EngineIncompatible, InvalidArgument
    from cog_triton.packages.vllm_environment import VLLMEnvironment
    from cog_triton.settings import load_settings
    from cog_triton.system.gpus import visible_gpus

    with cancellable():
        if lock is not None and not lock.is_file():
            raise InvalidArgument(f"--lock {str(lock)!r}: no such file")
        environment = VLLMEnvironment.of(load_settings().work_dir, lock)
        if dry_run:
            for line in environment.plan(python):
                typer.echo(line)
            return
        if not (visible_gpus() or without_gpu):
            raise EngineIncompatible(
                "this machine has no NVIDIA GPU that CUDA can see, so vLLM would not run: install"
                " the driver, or give --without-gpu to set it up for later"
            )
        environment.make(typer.echo, python)
        typer.echo(f"{what} is ready: {environment.python}. Serve: cog-triton serve ORG/NAME")
