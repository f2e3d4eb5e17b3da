"""``cog-triton serve --triton-only``: what the server does with Triton's ports only."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from contextlib import aclosing
from pathlib import Path

from cog_triton.artifact.compatibility import require_image
from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.processes.parent_link import Engines, ParentLink
from cog_triton.processes.restarts import STABLE_S, Restarts
from cog_triton.processes.waits import first_done
from cog_triton.serving.engine_preparation import prepare_engine
from cog_triton.settings import Settings, url_host
from cog_triton.system.gpus import ONE, EngineReplicas
from cog_triton.system.redaction import SERVER_KEYS
from cog_triton.triton import launch
from cog_triton.triton.server import TritonClient, TritonServer

_log = logging.getLogger(__name__)


async def start(
    settings: Settings, ports: Mapping[str, int], parent: ParentLink, repository: Path | None
) -> tuple[TritonServer, str]:
    """Start Triton on its private `ports`; it, and a message for the user.

    `repository` is served unchanged; without it, the engine's is rendered. A rank other than 0 has
    no ports and serves no requests, so it counts as ready at once. Raises the coded error of a
    start that fails.
    """
    if repository is not None and settings.engine_replicas > 1:
        raise InvalidArgument(
            f"ENGINE_REPLICAS={settings.engine_replicas}: not with --model-repo, whose models are"
            " served as they are"
        )
    found = await asyncio.to_thread(_model_repository, settings, repository, parent)
    models, world_size, secrets, replicas = found
    inner = settings.behind_front(ports) if ports else settings
    server = TritonServer(inner, models, parent, world_size, secrets, replicas)
    async with aclosing(TritonClient(inner)) as client:
        is_ready = client.is_ready if ports else lambda: asyncio.sleep(0, True)
        await server.start(is_ready, lambda: asyncio.sleep(0))
    return server, _ready_line(settings, world_size, server.log)


async def watch(settings: Settings, server: TritonServer) -> None:
    """Raise E2105 when a process of Triton has died, or engines have died too often.

    Triton is not restarted; an engine process is, as often as TRITON_MAX_RESTARTS permits.
    """
    required = _require_engines(server.engines, settings.triton_max_restarts)
    async with first_done(required, server.wait_for_failure()) as (engines, failed):
        if engines.done():
            engines.result()
    raise TritonUnavailable(f"{failed.result()}{server.last_lines()}")


def _model_repository(
    settings: Settings, repository: Path | None, parent: ParentLink
) -> tuple[Path, int, Collection[str], EngineReplicas]:
    """The model repository, its ranks, secrets that it may need, its engines.

    Models of the user's own may need any secret but this server's keys.
    """
    if repository is not None:
        if not any(repository.glob("*/config.pbtxt")):
            raise InvalidArgument(
                f"--model-repo={str(repository)!r}: must be a directory of Triton models, each with"
                " its config.pbtxt"
            )
        require_image(settings.cog_triton_sm)
        secrets = os.environ.keys() - SERVER_KEYS
        return repository.resolve(), launch.world_size(settings, None), secrets, ONE
    loaded = parent.has_loaded
    found = prepare_engine(settings, parent.run_dir, alone=True, loaded=loaded)
    return found.repository, found.world_size, found.family.secrets, found.replicas


async def _require_engines(fleet: Engines, restarts: int) -> None:
    """Watch engines die, which others replace.

    Raises E2105 if one does not load, or after too many deaths in a row; of several, the last one
    counts.
    """
    rule = Restarts(restarts)
    while True:
        death = await fleet.wait_for_death()
        if death.lasted is None:
            raise TritonUnavailable(death.reason)
        _log.error("engine %d: %s", death.replica, death.reason)
        if death.serving:
            continue
        rule.failed(stable=death.lasted >= STABLE_S)
        if rule.given_up:
            raise TritonUnavailable(rule.sentence(death.reason))


def _ready_line(settings: Settings, world_size: int, log: Path) -> str:
    if settings.cog_triton_rank:
        return f"Rank {settings.cog_triton_rank} of {world_size} started (log: {log})"
    host = url_host(settings.triton_host)
    grpc = "off (COG_TRITON_KEYS)"
    if not settings.has_tenants:
        grpc = f"127.0.0.1:{settings.triton_grpc_port}"
    of_ranks = "" if world_size == 1 else f" on {world_size} ranks"
    return (
        f"Triton ready in {{seconds:.1f}} s{of_ranks} (log: {log}):"
        f"\n  HTTP     {settings.scheme}://{host}:{settings.triton_http_port}/v2"
        f"\n  gRPC     {grpc}"
        f"\n  metrics  {settings.scheme}://{host}:{settings.triton_metrics_port}/metrics"
    )
