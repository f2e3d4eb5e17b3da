"""``cog-triton serve``: serve an engine through Triton behind Cog."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cog_triton.errors import InvalidArgument
from cog_triton.system.ports import OPENAI_PORT
from cog_triton.system.printable import printable
from cog_triton.system.terminal import cancellable, out

if TYPE_CHECKING:
    from cog_triton.settings import Settings
    from cog_triton.sources.source import Source

_MOCK_PANEL = "The mock engine"


def serve(
    engine: Annotated[
        str | None,
        typer.Argument(
            metavar="ENGINE",
            help="engine.tar (or .tar.gz, .tar.zst; path, URL or oci://REF), engine directory,"
            " Hugging Face model (ORG/NAME or ORG/NAME@REVISION), directory of safetensors, or"
            " .gguf file; without it ENGINE_DIR or COG_WEIGHTS, else the demo model.",
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Engine family for a model: openvino or vllm.", show_default="by machine"
        ),
    ] = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="Ask the hub again which commit ORG/NAME is, and serve that one."
        ),
    ] = False,
    host: Annotated[
        str, typer.Option(envvar="COG_HOST", help="Address Cog and Triton bind.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="PORT", help="Cog's HTTP port.", min=1, max=65535)
    ] = 5000,
    triton_http_port: Annotated[
        int | None, typer.Option(help="Triton's HTTP port (TRITON_HTTP_PORT, 8000).")
    ] = None,
    triton_grpc_port: Annotated[
        int | None, typer.Option(help="Triton's gRPC port (TRITON_GRPC_PORT, 8001).")
    ] = None,
    triton_metrics_port: Annotated[
        int | None, typer.Option(help="Triton's metrics port (TRITON_METRICS_PORT, 8002).")
    ] = None,
    openai_port: Annotated[
        int,
        typer.Option(
            envvar="OPENAI_PORT",
            help="Port of the OpenAI API and of /metrics; 0 for neither.",
            min=0,
            max=65535,
        ),
    ] = OPENAI_PORT,
    config: Annotated[
        Path | None, typer.Option(help="Serve config, YAML (COG_TRITON_CONFIG).")
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            envvar="COG_MAX_CONCURRENCY",
            min=1,
            help="Concurrent predictions that Cog accepts.",
            show_default="500, as many as there may be",
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks, a GPU for each (WORLD_SIZE).")
    ] = None,
    triton_only: Annotated[
        bool, typer.Option("--triton-only", help="Start Triton alone, without Cog.")
    ] = False,
    model_repo: Annotated[
        Path | None, typer.Option(help="With --triton-only: serve these models instead.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show Cog's own log.")] = False,
    engine_name: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="mock",
            help="In place of ENGINE: no model, a fixed text at a set rate, to measure and to"
            " inject faults (COG_TRITON_ENGINE).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    tps: Annotated[
        float | None,
        typer.Option(
            help="Tokens per second of each stream; 0 for full rate (MOCK_TPS, 44).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    behind_cog: Annotated[bool, typer.Option("--behind-cog", hidden=True)] = False,
) -> None:
    """Serve an engine or a model through Triton behind Cog; Ctrl-C stops everything.

    A model is converted once, and kept in the cache (COG_TRITON_WORK_DIR). Answers POST
    /predictions (streamed with Accept: text/event-stream) on PORT, OpenAI's API on OPENAI_PORT,
    and Triton's own API on its ports. Engines of several ranks are started through mpirun.

    Example: cog-triton serve engine.tar

    Example: cog-triton serve Qwen/Qwen3-0.6B

    Example: cog-triton serve --triton-only --world-size 4 --model-repo models

    Example: cog-triton serve --engine mock --tps 100
    """
    if behind_cog:  # Cog's worker starts this
        from cog_triton import serve as program

        raise typer.Exit(program.behind_cog())
    from cog_triton.sources.source import Network, Source

    source = None
    if engine and not (tps is not None or engine_name or os.environ.get("COG_TRITON_ENGINE")):
        # Before what follows is imported, which takes seconds.
        source = Source.open(engine, Network(say))

    from cog_triton.cli import server_run
    from cog_triton.serving.coglet.cog_server import MAX_SLOTS
    from cog_triton.settings import load_settings
    from cog_triton.system.ports import bound, require_free
    from cog_triton.system.redaction import redact_address

    if model_repo is not None and (engine or engine_name or not triton_only):
        raise typer.BadParameter(
            "goes with --triton-only, and in place of ENGINE", param_hint="--model-repo"
        )
    overrides = {
        "mock_tps": tps,
        "cog_triton_engine": engine_name,
        "world_size": world_size,
        "triton_http_port": triton_http_port,
        "triton_grpc_port": triton_grpc_port,
        "triton_metrics_port": triton_metrics_port,
        "openai_port": openai_port,
        "cog_host": host,
        "port": port,
        "cog_triton_config": config,
        "cog_weights": engine,
        "triton_host": None if "TRITON_HOST" in os.environ else host,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    settings = load_settings(**given)
    if engine and settings.cog_triton_engine:
        raise InvalidArgument(
            f"COG_TRITON_ENGINE={settings.cog_triton_engine!r}: not with ENGINE"
            f" {redact_address(engine)!r}"
        )
    if tps is not None and not settings.cog_triton_engine:
        raise InvalidArgument("--tps: is an option of --engine mock")
    # Before a long preparation, so that nobody takes a port meanwhile.
    ports = {} if settings.cog_triton_rank else settings.public_ports
    if triton_only:
        ports = {name: ports[name] for name in ports.keys() & settings.triton_ports.keys()}
    if ports:
        require_free({**ports, **settings.triton_ports})
    with bound(ports) as sockets:
        settings = prepared(settings, source, family, update, model_repo)
        alone = ["--triton-only"] if triton_only else None
        if alone and model_repo:
            alone.append(f"--model-repo={model_repo.resolve()}")
        slots = max_concurrency or MAX_SLOTS
        environment = server_run.server_environment(settings, slots, verbose=verbose)
        server_run.run(settings, sockets, environment, say, alone)


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
        say("Stopped; the next start continues here")
        raise typer.Exit(130) from None
    if found is None:
        return settings
    chosen = {
        "cog_weights": found.weights,
        "cog_triton_vllm_python": python or found.vllm_python,
        "served_model_name": settings.served_model_name or found.served_model_name,
    }
    return settings.model_copy(update=chosen)
