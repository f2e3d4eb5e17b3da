"""``cog-triton serve --triton-only``: Triton behind the front, without Cog."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from cog_triton.artifact.compatibility import require_image
from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.front.front import Front
from cog_triton.front.upstream import PrivatePorts, Upstream
from cog_triton.processes.engine_fleet import EngineFleet
from cog_triton.processes.engine_replicas import ONE, EngineReplicas
from cog_triton.serving.engine_preparation import prepare_engine
from cog_triton.serving.supervisor import STABLE_S
from cog_triton.settings import Settings, url_host
from cog_triton.system import process_tuning
from cog_triton.system.redaction import SERVER_KEYS
from cog_triton.system.work_dir import fresh_run_dir, require_usable
from cog_triton.triton import launch
from cog_triton.triton.server import TritonClient, TritonServer

_log = logging.getLogger(__name__)


_POLL_S = 0.1
_FIRST = asyncio.FIRST_COMPLETED


async def serve_triton_only(
    settings: Settings,
    sockets: Mapping[str, socket.socket],
    repository: Path | None,
    echo: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; a second signal stops at once.

    `repository` is served unchanged; without it, the engine's is rendered. Triton is not restarted
    when it dies; an engine process of its own is, as often as TRITON_MAX_RESTARTS permits.

    Raises:
        TritonUnavailable: a process of Triton died, or engines kept dying.
        CogTritonError: what made the start fail.
    """
    rank = settings.cog_triton_rank
    if repository is not None and settings.engine_replicas > 1:
        raise InvalidArgument(
            f"ENGINE_REPLICAS={settings.engine_replicas}: not with --model-repo, whose models are"
            " served as they are"
        )
    descriptors = process_tuning.raise_open_files()
    prepared = await _model_repository(settings, repository)
    repository, world_size, run_dir, secrets, replicas = prepared
    private = PrivatePorts(sockets)
    front = Front(settings, descriptors, sockets, Upstream(private.numbers), {})
    inner = settings.behind_front(private.numbers) if sockets else settings
    server = TritonServer(inner, repository, run_dir, world_size, secrets, replicas)
    stop, hurry = _on_signals()
    began = time.monotonic()
    starting = asyncio.ensure_future(_start(inner, server, leads=not rank))
    try:
        await asyncio.wait({starting, stop}, return_when=_FIRST)
        if not stop.done():
            starting.result()
            echo(_ready_line(settings, world_size, server.log, time.monotonic() - began))
            await _wait_for_exit(settings, server, stop)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        drained = front if stop.done() else None
        stopping = asyncio.ensure_future(_stop(server, drained, settings.drain_timeout))
        await asyncio.wait({stopping, hurry}, return_when=_FIRST)
        stopping.cancel()
        server.kill()
        server.kill_engines()
        await front.close()
        private.close()


def _on_signals() -> tuple[asyncio.Future[None], asyncio.Future[None]]:
    """Futures of the first and the second SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()

    def on_signal() -> None:
        if not second.done():
            (second if first.done() else first).set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return first, second


async def _model_repository(
    settings: Settings, repository: Path | None
) -> tuple[Path, int, Path, Collection[str], EngineReplicas]:
    """The model repository, its ranks, the run directory, secrets that it may need, its engines.

    Models of the user's own may need any secret but this server's keys.
    """
    if repository is not None:
        if not any(repository.glob("*/config.pbtxt")):
            raise InvalidArgument(
                f"--model-repo={str(repository)!r}: must be a directory of Triton models, each with"
                " its config.pbtxt"
            )
        require_image(settings.cog_triton_sm)
        require_usable(settings.work_dir)
        run_dir = fresh_run_dir(settings.work_dir)
        secrets = os.environ.keys() - SERVER_KEYS
        return repository.resolve(), launch.world_size(settings, None), run_dir, secrets, ONE
    found = await prepare_engine(settings, alone=True)
    start = found.repository, found.world_size, found.run_dir
    return *start, found.family.secrets, found.replicas


async def _start(settings: Settings, server: TritonServer, *, leads: bool) -> None:
    """Start Triton; a rank other than 0 serves no requests, so it counts as ready at once."""

    async def no_probe() -> None:
        pass

    async def always_ready() -> bool:
        return True

    async with TritonClient(settings) as client:
        await server.start(client.is_ready if leads else always_ready, no_probe)


async def _stop(server: TritonServer, front: Front | None, seconds: float) -> None:
    """Refuse new requests, and stop Triton once those that run have ended."""
    if front is not None:
        _log.info("stopping: what runs may end within %g s (DRAIN_TIMEOUT)", seconds)
        deadline = time.monotonic() + seconds
        await front.drain(lambda: time.monotonic() < deadline)
        await front.flush(lambda: time.monotonic() < deadline)
    await server.stop()


async def _wait_for_exit(
    settings: Settings, server: TritonServer, stop: asyncio.Future[None]
) -> None:
    engines: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed = asyncio.ensure_future(server.wait_for_failure())
    if server.engines is not None:
        engines = asyncio.ensure_future(
            _require_engines(server.engines, settings.triton_max_restarts)
        )
    waits: list[asyncio.Future[Any]] = [stop, engines, failed]
    try:
        while server.alive and not failed.done():
            await asyncio.wait(waits, timeout=_POLL_S, return_when=_FIRST)
            if stop.done():
                return
            if engines.done():
                engines.result()
    finally:
        engines.cancel()
        failed.cancel()
    reason = failed.result() if failed.done() else "Triton has died"
    raise TritonUnavailable(f"{reason}; its last lines (of {server.log}):\n{server.log_tail()}")


async def _require_engines(fleet: EngineFleet, restarts: int) -> None:
    """Watch engines die, which others replace.

    Raises E2105 if one does not load, or after too many deaths in a row; of several, the last one
    counts.
    """
    failures = 0
    while True:
        death = await fleet.wait_for_death()
        if death.lasted is None:
            raise TritonUnavailable(death.reason)
        _log.error("engine %d: %s", death.replica, death.reason)
        if death.serving:
            continue
        failures = 1 if death.lasted >= STABLE_S else failures + 1
        if failures > restarts:
            raise TritonUnavailable(
                f"given up after {failures - 1} restarts in a row (TRITON_MAX_RESTARTS):"
                f" {death.reason}"
            )


def _ready_line(settings: Settings, world_size: int, log: Path, seconds: float) -> str:
    if settings.cog_triton_rank:
        return f"Rank {settings.cog_triton_rank} of {world_size} started (log: {log})"
    host = url_host(settings.triton_host)
    grpc = "off (COG_TRITON_KEYS)"
    if not settings.has_tenants:
        grpc = f"127.0.0.1:{settings.triton_grpc_port}"
    of_ranks = "" if world_size == 1 else f" on {world_size} ranks"
    return (
        f"Triton ready in {seconds:.1f} s{of_ranks} (log: {log}):"
        f"\n  HTTP     {settings.scheme}://{host}:{settings.triton_http_port}/v2"
        f"\n  gRPC     {grpc}"
        f"\n  metrics  {settings.scheme}://{host}:{settings.triton_metrics_port}/metrics"
    )
