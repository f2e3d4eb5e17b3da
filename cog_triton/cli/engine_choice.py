"""Preparation of what the command ``serve`` is to serve, with lines for the user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cog_triton.errors import InvalidArgument
from cog_triton.system.printable import printable
from cog_triton.system.terminal import cancellable, out

if TYPE_CHECKING:
    from cog_triton.settings import Settings
    from cog_triton.sources.source import Source


def say(line: str) -> None:
    """Print a line of what is being done; it may hold any characters."""
    out.print(printable(line, keep="\n\t"), markup=False)


def prepared(
    settings: Settings, source: Source | None, family: str | None, update: bool, repo: Path | None
) -> Settings:
    """`settings` for what is to be served, once that is fetched and converted."""
    from cog_triton.artifact.compatibility import require_image
    from cog_triton.errors import BuildCancelled
    from cog_triton.models.preparation import (
        Preparation,
        default_model,
        provide_triton,
        require_libpython,
    )
    from cog_triton.system.work_dir import require_usable
    from cog_triton.triton.serve_config import load_serve_config

    if settings.cog_triton_engine is None:
        require_image(settings.cog_triton_sm)
    python = settings.cog_triton_vllm_python
    if settings.cog_triton_config is not None:  # what is wrong there needs no download
        arguments = load_serve_config(settings.cog_triton_config).arguments_of("tensorrt_llm")
        python = python or arguments.get("engine_python")
    named = source or (None if repo is not None else default_model(settings))
    if named is None and (family or update):
        raise InvalidArgument("--family and --update: go with a model that is named, ENGINE")
    try:
        with cancellable():
            require_usable(settings.work_dir)
            require_libpython(settings)
            found = None
            if named is not None:
                found = Preparation(settings, say, family, update=update).prepare(named)
            provide_triton(settings, say)
    except BuildCancelled:
        say("Stopped; the next start goes on from here")
        raise typer.Exit(130) from None
    if found is None:
        return settings
    chosen = {
        "cog_weights": found.weights,
        "cog_triton_vllm_python": python or found.vllm_python,
        "served_model_name": settings.served_model_name or found.served_model_name,
    }
    return settings.model_copy(update=chosen)
