"""The server of ``cog-triton serve``: its environment, and lines for the user."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cog_triton import __version__
from cog_triton.processes.parent import Parent, Programs
from cog_triton.serve import programs
from cog_triton.serving.coglet import cog_server
from cog_triton.settings import Settings, url_host
from cog_triton.system.paths import cog_project
from cog_triton.system.terminal_progress import ProgressLine

_STILL_S = 30
_PASSED_ON = (
    *("COG_HOST", "PORT", "OPENAI_PORT", "METRICS_PORT", "COG_TRITON_ENGINE", "SERVED_MODEL_NAME"),
    *("TRITON_HOST", "TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"),
)


def run(
    settings: Settings,
    sockets: Mapping[str, socket.socket],
    environment: Mapping[str, str],
    echo: Callable[[str], None],
    triton_only: list[str] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; raises the coded error that it ends with.

    `echo` gets status lines. `triton_only` has the server's arguments without Cog.
    """
    if triton_only is None:
        echo(f"cog-triton {__version__}: starting; the first start unpacks the engine")
        project = cog_project("mock_cog_triton" if settings.cog_triton_engine else "runner")
        started = programs(environment, cwd=project)
    else:
        started = Programs(triton_only, environment)

    async def serve() -> None:
        def on_ready(seconds: float, message: str) -> None:
            waiting.cancel()
            line.end()
            echo(message.format(seconds=seconds) if message else ready_message(settings, seconds))

        stops = "Stopping: running requests may end; once more stops at once"
        waiting = asyncio.ensure_future(_report_waiting(settings, echo))
        parent = Parent(settings, sockets, started, on_ready=on_ready, on_stop=lambda: echo(stops))
        await parent.run()

    try:
        with ProgressLine() as line:
            line.begin("starting Triton and loading the engine")
            asyncio.run(serve())
    finally:
        cog_server.leave_place()


async def _report_waiting(settings: Settings, echo: Callable[[str], None]) -> None:
    for seconds in itertools.count(_STILL_S, _STILL_S):
        await asyncio.sleep(_STILL_S)
        echo(
            f"still starting after {seconds} s: the engine is unpacked and loaded, for which Triton"
            f" has {settings.triton_start_timeout:g} s (TRITON_START_TIMEOUT)"
        )


def ready_message(settings: Settings, seconds: float) -> str:
    """What is printed when Cog is ready after `seconds`: ports, and a request to try."""
    name = url_host(settings.cog_host)
    base = f"{settings.scheme}://{'localhost' if name == '127.0.0.1' else name}"
    openai = f"OpenAI API on {settings.openai_port}, " if settings.openai_port else ""
    page = ""
    if settings.openai_port and settings.openai_page:
        page = f" {base}:{settings.openai_port}/ in a browser, or"
    grpc = "" if settings.has_tenants else f" {settings.triton_grpc_port},"
    return (
        f"Ready in {seconds:.1f} s ({openai}Triton on {settings.triton_http_port},"
        f"{grpc} {settings.triton_metrics_port}). Try{page}:\n"
        f"curl -sN -XPOST {base}:{settings.port}/predictions"
        " -H 'Content-Type: application/json' -H 'Accept: text/event-stream'"
        """ -d '{"input":{"prompt":"What is the capital of France?"}}'"""
    )


def server_environment(
    settings: Settings, max_concurrency: int, *, verbose: bool
) -> dict[str, str]:
    """The complete environment of the server.

    Paths are absolute, since it runs in the directory of Cog's project. `verbose` leaves Cog's own
    log on.
    """
    weights = settings.cog_weights or ""
    given = ((name, getattr(settings, name)) for name in type(settings).model_fields)
    paths = (  # links stay, and a program that is found by its name
        (name, value)
        for name, value in given
        if isinstance(value, Path) and not (name == "mpirun" and len(value.parts) == 1)
    )
    environment = {
        **os.environ,
        # coglet starts its worker as `python` of PATH, not as this interpreter.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        **{name: str(getattr(settings, name.lower()) or "") for name in _PASSED_ON},
        "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
        "COG_MAX_CONCURRENCY": str(max_concurrency),
        **{name.upper(): str(value.absolute()) for name, value in paths},
        "COG_TRITON_WORK_DIR": str(settings.work_dir.resolve()),
        "ENGINE_DIR": str(settings.engine_dir.resolve()),
        "COG_WEIGHTS": weights if "://" in weights or not weights else str(Path(weights).resolve()),
        **{f"MOCK_{name.upper()}": str(v) for name, v in settings.mock_options.items()},
    }
    if settings.world_size:
        environment["WORLD_SIZE"] = str(settings.world_size)
    environment.setdefault("LOG_FORMAT", "console")
    if not verbose:
        environment.setdefault("COG_LOG_LEVEL", "error")
    return environment
