"""The ``cog-triton`` command: build an engine, look at it, serve it, measure it, ask it, prune."""

from __future__ import annotations

import asyncio
import enum
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cog_triton import __version__
from cog_triton.cli_bench import bench
from cog_triton.cli_prune import prune
from cog_triton.cli_tools import client, doctor
from cog_triton.errors import EngineIncompatible, InvalidArgument
from cog_triton.ports import OPENAI_PORT
from cog_triton.terminal import coded_errors as _coded_errors
from cog_triton.terminal import err as _err
from cog_triton.terminal import out as _out

app = typer.Typer(
    help="From a YAML file to a served LLM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_MOCK_PANEL = "The mock engine"


class Schema(str, enum.Enum):
    """Files that have a JSON schema."""

    BUILD = "build"


def _say(line: str) -> None:
    _out.print(line, markup=False)


def _version(wanted: bool) -> None:
    if wanted:
        _out.print(f"cog-triton {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """From a YAML file to a served LLM."""


@app.command()
def build(
    config: Annotated[
        Path | None, typer.Argument(help="Build config, YAML; see configs/build/.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="What to write: a .tar, .tar.gz or .tar.zst."),
    ] = Path("engine.tar"),
    work_dir: Annotated[
        Path,
        typer.Option(help="Where steps run and models are kept; what is found here is used."),
    ] = Path(".work/build"),
    check: Annotated[
        bool, typer.Option("--check", help="Check CONFIG and its arguments, and build nothing.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be run, and build nothing.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run every step, finished ones too.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Remove what builds of CONFIG left in the work directory; without CONFIG, what"
            " all builds left, and downloaded models. Build nothing.",
        ),
    ] = False,
) -> None:
    """Build an engine: convert, quantize and build as CONFIG says, then pack engine.tar.

    Arguments are checked against the options of the scripts before anything runs.
    What is finished is not done again, after a kill either: builds resume.
    --check ends with exit code 2 if the options of a script are not known here.

    Example: cog-triton build configs/build/smollm2-135m-cpu.yaml -o engine.tar
    """
    from cog_triton.build import command

    echo = typer.echo  # a tenth of what rich takes, and scripts write many lines

    with _coded_errors():
        if clean:
            command.clean(config, work_dir, echo)
            return
        if config is None:
            raise typer.BadParameter(
                "name a build config, as in configs/build/", param_hint="CONFIG"
            )
        if check or plan:
            if not command.look(config, work_dir, output, echo, check=check, plan=plan):
                raise typer.Exit(2)
            return
        command.build(config, work_dir, output, echo, cache=not no_cache)
        echo(
            f"Built {output} ({output.stat().st_size / 1e6:.0f} MB)."
            f" Serve it: cog-triton serve {shlex.quote(str(output))}"
        )


@app.command()
def schema(
    what: Annotated[Schema, typer.Argument(help="Which file's schema.")],
) -> None:
    """Print a JSON schema, for editors to check and complete YAML files.

    Example: cog-triton schema build > build.schema.json
    """
    from cog_triton.build.config_schema import as_json

    typer.echo(as_json())


@app.command()
def serve(
    engine: Annotated[
        str | None,
        typer.Argument(
            help="engine.tar (or .tar.gz, .tar.zst; path or URL) or engine directory; without it"
            " ENGINE_DIR or COG_WEIGHTS of the environment."
        ),
    ] = None,
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
            help="Predictions Cog accepts at once.",
            show_default="256; twice the streams with --engine mock",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", "--world_size", min=1, help="Ranks, a GPU for each (WORLD_SIZE)."
        ),
    ] = None,
    triton_only: Annotated[
        bool, typer.Option("--triton-only", help="Start Triton alone, without Cog.")
    ] = False,
    model_repo: Annotated[
        Path | None,
        typer.Option(
            "--model-repo", "--model_repo", help="With --triton-only: serve these models instead."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show Cog's own log.")] = False,
    engine_name: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="In place of ENGINE, mock: no model, a fixed text at a set rate, to measure and"
            " to break everything else (COG_TRITON_ENGINE).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    tps: Annotated[
        float | None,
        typer.Option(
            help="Tokens per second of each stream; 0 for as many as Triton takes (MOCK_TPS, 44).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    jitter: Annotated[
        float | None,
        typer.Option(
            help="How far a token may stray from its time, 0 to 1: as a part of the time between"
            " two of them, half to either side (MOCK_JITTER, 0).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds for each input token, before output begins (MOCK_PREFILL_MS, 0).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    tokens_per_response: Annotated[
        int | None,
        typer.Option(
            help="Tokens that leave the engine together (MOCK_TOKENS_PER_RESPONSE, 1).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    join: Annotated[
        bool | None,
        typer.Option(
            "--join/--no-join",
            help="Whether tokens that are late leave as one response, as with our own engines, or"
            " one by one, as with TensorRT-LLM's (MOCK_JOIN, true).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Streams at once; more of them wait (MOCK_MAX_BATCH_SIZE, 256).",
            rich_help_panel=_MOCK_PANEL,
        ),
    ] = None,
) -> None:
    """Serve an engine through Triton behind Cog; Ctrl-C stops everything.

    Answers POST /predictions (streamed with Accept: text/event-stream) on PORT, OpenAI's API on
    OPENAI_PORT, and Triton's own API on its ports. Engines of several ranks are started
    through mpirun.

    Example: cog-triton serve engine.tar

    Example: cog-triton serve --triton-only --world-size 4 --model-repo models

    Example: cog-triton serve --engine mock --tps 100 --prefill 0.2
    """
    from cog_triton.serving import triton_alone
    from cog_triton.serving.server import CogServer, default_concurrency
    from cog_triton.settings import load_settings

    if model_repo is not None and (engine or engine_name or not triton_only):
        raise typer.BadParameter(
            "goes with --triton-only, and in place of ENGINE", param_hint="--model-repo"
        )
    mock = {
        "mock_tps": tps,
        "mock_jitter": jitter,
        "mock_prefill_ms": prefill,
        "mock_tokens_per_response": tokens_per_response,
        "mock_join": join,
        "mock_max_batch_size": max_batch_size,
    }
    with _coded_errors():
        overrides = {
            **mock,
            "cog_triton_engine": engine_name,
            "world_size": world_size,
            "triton_http_port": triton_http_port,
            "triton_grpc_port": triton_grpc_port,
            "triton_metrics_port": triton_metrics_port,
            "openai_port": openai_port,
            "cog_host": host,
            "cog_triton_config": config,
            "cog_weights": engine,
            "triton_host": None if "TRITON_HOST" in os.environ else host,
        }
        settings = load_settings(
            **{name: value for name, value in overrides.items() if value is not None}
        )
        if engine and settings.cog_triton_engine:
            raise InvalidArgument(
                f"COG_TRITON_ENGINE={settings.cog_triton_engine!r}: not with ENGINE {engine!r}"
            )
        given = [name for name, value in mock.items() if value is not None]
        if given and not settings.cog_triton_engine:
            raise InvalidArgument(f"{given[0].upper()}: is an option of --engine mock")
        if triton_only:
            asyncio.run(triton_alone.serve(settings, model_repo, _say))
            return
        server = CogServer(
            settings, host, port, max_concurrency or default_concurrency(settings), verbose=verbose
        )
        server.run(_say)


@app.command(name="inspect")
def inspect_engine(
    engine: Annotated[
        Path, typer.Argument(help="engine.tar (or .tar.gz, .tar.zst) or a directory.")
    ],
    check_gpu: Annotated[
        bool, typer.Option("--check-gpu", help="Fail unless it fits the GPUs of this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tell what ENGINE is and for which GPU, and check every file's checksum.

    Nothing is unpacked. An engine that is damaged, incomplete or none at all ends
    in E1306 and exit code 1, one for another GPU (--check-gpu) in E1305. A tar
    without manifest, as older builders made, is described by its config.json.

    Example: cog-triton inspect --check-gpu engine.tar
    """
    from cog_triton.inspection import contents, describe, gpu, report
    from cog_triton.preflight import visible_gpus

    with _coded_errors():
        with _err.status("Reading every byte of it"):
            found = describe.describe(contents.read(engine))
        fit = gpu.check(found, visible_gpus()) if check_gpu else None
        if as_json:
            typer.echo(report.as_json(found, fit))
        else:
            Console(highlight=False, emoji=False).print(report.as_table(found, fit))
        if fit and fit.problem:
            raise EngineIncompatible(fit.problem)


app.command()(bench)
app.command()(client)
app.command()(doctor)
app.command()(prune)
