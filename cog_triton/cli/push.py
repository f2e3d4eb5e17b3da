"""``cog-triton push``: send an engine to an OCI registry."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from cog_triton.cli.serve import say
from cog_triton.system.terminal import cancellable, out

_COG_PANEL = "Cog's managed weights"


def push(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="REGISTRY/REPOSITORY[:TAG], as ghcr.io/me/llm:v1, with oci:// or without.",
        ),
    ],
    engine: Annotated[
        str, typer.Argument(help="engine.tar (or .tar.gz, .tar.zst) or an engine directory.")
    ] = "engine.tar",
    mount_from: Annotated[
        str | None,
        typer.Option(
            metavar="REPOSITORY",
            help="Repository of the same registry that has some of its files already.",
        ),
    ] = None,
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http", help="Reach the registry by HTTP; to this machine it is anyway."
        ),
    ] = False,
    cog_weight: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Push it as the managed weight NAME of a Cog model, not as an image.",
            rich_help_panel=_COG_PANEL,
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="Where Cog mounts that weight.", rich_help_panel=_COG_PANEL),
    ] = "/src/weights",
) -> None:
    """Push ENGINE to an OCI registry; cog-triton serve oci://REF serves it from there.

    Each file is a layer, so what the registry has already is not sent again, be it of another
    engine. After an interrupted push, the next one sends the files that the registry lacks. Every
    file is compared with the engine's manifest before. What is printed last is the reference with
    its digest, which always names these bytes. Kubernetes' image volumes and docker run --mount
    type=image mount it, too.

    Log in with docker login or podman login, whose credentials and helpers are used.

    Example: cog-triton push ghcr.io/me/llama-sm90:v1 engine.tar

    Example: cog-triton push --mount-from me/llama-sm90 ghcr.io/me/llama-sm90-lora:v1
    """
    from cog_triton.download.transfer_progress import size_text
    from cog_triton.errors import BuildCancelled, InvalidArgument
    from cog_triton.oci import engine_push
    from cog_triton.oci.reference import Reference
    from cog_triton.settings import load_settings
    from cog_triton.sources.source import Source

    named = Reference.parse(reference)
    found = Source.open(engine)
    if not found.is_engine or found.path is None:
        what = "an engine elsewhere" if found.is_engine else "a model"
        raise InvalidArgument(f"{found.name!r}: is {what}; push takes an engine that is here")
    settings = load_settings()
    try:
        with cancellable():
            pushed = engine_push.push(
                named,
                found.path,
                settings.work_dir / "push",
                say,
                threading.Event(),
                cog_weight=None if cog_weight is None else (cog_weight, target),
                mount_from=mount_from,
                plain_http=(named.host,) if plain_http else settings.plain_http_registries,
            )
    except BuildCancelled:
        say("Stopped; the next push sends the files that the registry lacks")
        raise typer.Exit(130) from None
    say(f"[push] sent {size_text(pushed.sent)} of {size_text(pushed.total)}")
    out.print(str(pushed.reference), markup=False)
