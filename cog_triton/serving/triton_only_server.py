"""``cog-triton serve --triton-only``: Triton behind the front door, without Cog."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from cog_triton.artifact.compatibility import require_image
from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.processes.engine_fleet import EngineFleet
from cog_triton.processes.engine_replicas import ONE, EngineReplicas
from cog_triton.serving.engine_preparation import prepare_engine
from cog_triton.serving.supervisor import STABLE_S
from cog_triton.settings import Settings, url_host
from cog_triton.system import ports, process_tuning, reaper
from cog_triton.system.redaction import SERVER_KEYS
from cog_triton.system.work_dir import fresh_run_dir, require_usable
from cog_triton.triton import launch
from cog_triton.triton.server import TritonClient, TritonServer

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0


class TritonDoor:
    """The front door before a Triton that listens on private ports."""

    def __init__(self, settings: Settings) -> None:
        self._reserved = [ports.reserve() for _ in range(2)]
        http, metrics = (reserved.getsockname()[1] for reserved in self._reserved)
        self.triton_settings = settings.model_copy(
            update={
                "triton_host": "127.0.0.1",
                "triton_http_port": http,
                "triton_metrics_port": metrics,
            }
        )
        environment = {
            name: str(value)
            for name, value in (
                ("TRITON_HOST", settings.triton_host),
                ("TRITON_HTTP_PORT", settings.triton_http_port),
                ("TRITON_METRICS_PORT", settings.triton_metrics_port),
            )
        }
        self._process = reaper.spawn(
            [
                *(sys.executable, "-m", "cog_triton.door"),
                *("--beside-triton", str(http), str(metrics)),
            ],
            grace=settings.drain_timeout + _CLOSE_S,
            env={"LOG_FORMAT": "console", **os.environ, **environment},
        )
        self._drain_s = settings.drain_timeout

    def exit_code(self) -> int | None:
        """How the door ended, None while it is open."""
        return self._process.poll()

    async def drain(self) -> None:
        """Have it refuse new requests; returns once those that run have ended, and it with them."""
        self._process.terminate()
        deadline = time.monotonic() + self._drain_s + _CLOSE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """End it at once, and give its ports back."""
        self._process.kill()
        for reserved in self._reserved:
            reserved.close()


_POLL_S = 0.1


async def serve_triton_only(
    settings: Settings, repository: Path | None, echo: Callable[[str], None]
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
    if not rank:
        ports.require_free(settings.triton_ports)
    process_tuning.raise_open_files()
    prepared = await _model_repository(settings, repository)
    repository, world_size, run_dir, secrets, replicas = prepared
    door = None if rank else TritonDoor(settings)
    triton_settings = door.triton_settings if door else settings
    server = TritonServer(triton_settings, repository, run_dir, world_size, secrets, replicas)
    stops = _StopSignals()
    began = time.monotonic()
    starting = asyncio.ensure_future(_start(settings, server, leads=not rank))
    try:
        while not (starting.done() or stops.first.done()):
            _require_open(door)
            await asyncio.wait(
                {starting, stops.first}, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
        if not stops.first.done():
            starting.result()
            echo(_ready_line(settings, world_size, server.log, time.monotonic() - began))
            await _wait_for_exit(settings, server, door, stops.first)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        stopping = asyncio.ensure_future(_stop(server, door if stops.first.done() else None))
        await asyncio.wait({stopping, stops.second}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.kill()
        server.kill_engines()
        if door is not None:
            door.close()
        stops.close()


class _StopSignals:
    """Futures of the first and the second SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()
        self.second: asyncio.Future[None] = self._loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(None)
                return

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


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
    prepared = await prepare_engine(settings, alone=True)
    return (
        prepared.repository,
        prepared.world_size,
        prepared.run_dir,
        prepared.family.secrets,
        prepared.replicas,
    )


async def _start(settings: Settings, server: TritonServer, *, leads: bool) -> None:
    """Start Triton; a rank other than 0 serves no requests, so it counts as ready at once."""

    async def no_probe() -> None:
        pass

    async def always_ready() -> bool:
        return True

    if not leads:
        await server.start(always_ready, no_probe)
        return
    async with TritonClient(settings) as client:
        await server.start(client.is_ready, no_probe)


async def _stop(server: TritonServer, door: TritonDoor | None) -> None:
    """Stop Triton, once the requests of its door have ended."""
    if door is not None:
        await door.drain()
    await server.stop()


def _require_open(door: TritonDoor | None) -> None:
    if door is not None and (code := door.exit_code()) is not None:
        raise TritonUnavailable(f"the front door exited with code {code}")


async def _wait_for_exit(
    settings: Settings,
    server: TritonServer,
    door: TritonDoor | None,
    stop: asyncio.Future[None],
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
            _require_open(door)
            await asyncio.wait(waits, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
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
