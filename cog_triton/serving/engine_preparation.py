"""Engine preparation: fetch the weights, run the pre-flight check, render the model repository."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import compatibility, engine_manifest, engine_tar
from cog_triton.artifact.compatibility import Machine, backends_in, library_versions
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.url_download import fetch, local_path, redacted_name
from cog_triton.engines.base import EngineFamily
from cog_triton.engines.mock.mock_directory import make_engine
from cog_triton.engines.registry import open_engine
from cog_triton.errors import (
    BuildConfigInvalid,
    EngineCorrupt,
    EngineIncompatible,
    InvalidArgument,
    ModelUnavailable,
)
from cog_triton.oci.reference import Reference, is_oci
from cog_triton.pictures.image_limits import ImageLimits
from cog_triton.serving import sealed_engine
from cog_triton.serving.adapter_store import AdapterStore
from cog_triton.settings import Settings
from cog_triton.system.gpus import ONE, EngineReplicas, share_gpus, visible_gpus
from cog_triton.system.redaction import redact_address
from cog_triton.system.work_dir import require_usable, work_dir_errors
from cog_triton.text.stop_strings import WordLimits
from cog_triton.triton import installation, launch
from cog_triton.triton.model_repository import ENGINE_MODEL, render_repository
from cog_triton.triton.serve_config import ServeConfig, find_serve_config

_log = logging.getLogger(__name__)
_RETRY = RetryPolicy()


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine, and its rendered model `repository` for `world_size` ranks.

    `replicas` are how many of it serve.
    """

    family: EngineFamily
    repository: Path
    world_size: int
    adapters: AdapterStore | None = None
    replicas: EngineReplicas = ONE


def prepare_engine(
    settings: Settings, run_dir: Path, *, alone: bool = False, loaded: bool = False
) -> PreparedEngine:
    """Fetch the engine, check it against this machine, and render its repository in `run_dir`.

    Cheap checks come first: a bad config is reported before any weights are fetched. `alone` is as
    in `Demand.require`; an engine that is `loaded` needs no more memory. Blocks. Raises the coded
    error of the first check that fails.
    """
    family, config = _open_configured(settings)
    family.check_environment(settings)
    world_size = launch.world_size(settings, family.world_size or 1)
    replicas = _replicas(settings, family)
    with work_dir_errors(settings.work_dir):
        _require_compatible(settings, family, config, run_dir)
        if not loaded:
            _require_memory(settings, family, config, alone=alone)
        word_limits = WordLimits(settings.max_stop_sequences)
        adapters = _load_adapters(settings, family, config, run_dir)
        repository = render_repository(
            family, config, run_dir / "model_repo", word_limits, ImageLimits.of(settings)
        )
    return PreparedEngine(family, repository, world_size, adapters, replicas)


def _replicas(settings: Settings, family: EngineFamily) -> EngineReplicas:
    """The engines of ENGINE_REPLICAS; raises E1005 for what they do not go with, and E1305."""
    count = settings.engine_replicas
    if count == 1:
        return ONE
    if settings.spare_engine:
        raise InvalidArgument(f"ENGINE_REPLICAS={count}: must be 1 with SPARE_ENGINE")
    return share_gpus(count, family.gpus)


def _open_configured(settings: Settings) -> tuple[EngineFamily, ServeConfig]:
    """Fetch and open the engine; returns it with its serve config, which settings add to."""
    if settings.cog_triton_engine is None:
        compatibility.require_image(settings.cog_triton_sm)
    require_usable(settings.work_dir)
    config = find_serve_config(settings.cog_triton_config)
    family = open_engine(sealed_engine.with_weights(settings, _engine_directory(settings)))
    if (family.world_size or family.gpus) and settings.cog_triton_sm != "cpu":
        compatibility.require_driver()
    more = dict(family.options(settings))
    if family.sealable:
        more |= sealed_engine.options(settings, family.directory, settings.cog_weights)
    return family, config.with_overrides(ENGINE_MODEL, more) if more else config


def _require_memory(
    settings: Settings, family: EngineFamily, config: ServeConfig, *, alone: bool
) -> None:
    """Compare its weights with the GPUs here; raises E1305 if they cannot fit."""
    try:
        wanted = family.memory()
    except (BuildConfigInvalid, ModelUnavailable) as error:
        _log.info("memory of the GPU: not compared: %s", error.detail)
        return
    if wanted is None:
        return
    if config.arguments_of(ENGINE_MODEL).get("gpu_device_ids"):
        _log.info("memory of the GPU: not compared: gpu_device_ids is given")
        return
    wanted.require(skip=settings.cog_triton_skip_preflight, alone=alone)


def _load_adapters(
    settings: Settings, family: EngineFamily, config: ServeConfig, run_dir: Path
) -> AdapterStore | None:
    """Fetch and check the LoRA adapters, for `family` to render; None where there are to be none.

    Raises E1304, E1305, E1306 or E1005 naming the adapter.
    """
    if not (family.adapters or config.adapters or settings.lora_dir):
        return None
    store = AdapterStore(settings, family.lora_limits(), run_dir)
    token = os.environ.get("HF_TOKEN") or None
    for name, source in family.adapters.items():
        if name in config.adapters:
            _log.info("LoRA adapter %r: the serve config's, not the engine's own", name)
        else:
            store.fetch(name, source, family.directory, token)
    for name, source in config.adapters.items():
        store.fetch(name, source, config.directory, token)
    family.registry = store.registry
    return store


def _engine_directory(settings: Settings) -> Path:
    weights = settings.cog_weights
    if settings.cog_triton_engine is None:
        return engine_directory(settings, weights)
    if weights:
        raise InvalidArgument(
            f"COG_WEIGHTS={redact_address(weights)!r}: not with COG_TRITON_ENGINE="
            f"{settings.cog_triton_engine}, which needs no weights; set one of them"
        )
    with work_dir_errors(settings.work_dir):
        return make_engine(settings.work_dir / "engines", settings.mock_answers)


def _require_compatible(
    settings: Settings, family: EngineFamily, config: ServeConfig, run_dir: Path
) -> None:
    """Pre-flight check of the engine against this machine; raises E1305 or E1306."""
    triton = installation.find_installation(
        run_dir, settings.tritonserver, settings.tritonserver_backend_dir
    )
    nodes = str(config.arguments_of(ENGINE_MODEL).get("num_nodes", 1))
    try:
        needs = compatibility.needs_of(
            family.directory,
            family.backend,
            family.world_size,
            family.versions,
            max(int(nodes) if nodes.isdecimal() else 1, len(settings.mpi_host_names), 1),
        )
        here = Machine(
            visible_gpus() if family.world_size else (),
            triton.binary,
            backends_in(triton.backend_directory),
            library_versions(),
        )
        for remark in compatibility.require_engine(needs, here):
            _log.warning("%s", remark)
    except EngineIncompatible as error:
        if not settings.cog_triton_skip_preflight:
            raise
        _log.warning("COG_TRITON_SKIP_PREFLIGHT is set, so this is served: %s", error)


def engine_directory(settings: Settings, weights: str | None) -> Path:
    """The engine directory to serve: ENGINE_DIR, or the unpacked `weights` if given.

    `weights` is a directory, the path or URL of an engine.tar, or oci://REF.
    Raises E1304 when they cannot be found, E1306 when they are corrupt, E2302 when the disk is
    full. An interrupted download is resumed.
    """
    if not weights:
        return settings.engine_dir
    if is_oci(weights):
        return _pull(settings, weights)
    engines = settings.work_dir / "engines"
    try:
        name, tar = redacted_name(weights), local_path(weights)
    except ModelUnavailable as error:
        shown = redact_address(weights)
        why = error.detail.removeprefix(f"{shown}: ")
        raise ModelUnavailable(f"COG_WEIGHTS={shown!r}: {why}; oci://REF is taken, too") from None
    if tar is None:
        tar = _download(weights, name, settings.work_dir / "downloads")
        try:
            return _unpack(tar, engines)
        except EngineCorrupt:
            tar.unlink(missing_ok=True)  # so that the next start downloads it again
            raise
    if tar.is_dir():
        return tar
    if not tar.is_file():
        raise ModelUnavailable(
            f"COG_WEIGHTS={redact_address(weights)!r}: no such file or directory"
        )
    return _unpack(tar, engines)


def _unpack(tar: Path, engines: Path) -> Path:
    stat = tar.stat()
    identity = f"{tar.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    target = engines / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if target.is_dir():
        manifest = engine_manifest.load(target)
        if manifest is not None:
            engine_manifest.verify(target, manifest)
        return target
    engines.mkdir(parents=True, exist_ok=True)
    _log.info("Unpacking %s (%.0f MB)", tar, stat.st_size / 1e6)
    if engine_tar.unpack(tar, target) is None:
        _log.warning("%s has no cog-triton.json to check by", tar.name)
    return target


def _pull(settings: Settings, weights: str) -> Path:
    """The engine that `weights`, oci://REF, is in its registry now."""
    from cog_triton.oci.engine_pull import Puller  # most servers do without

    plain, never = settings.plain_http_registries, threading.Event()
    puller = Puller(settings.work_dir, _log.info, never, plain_http=plain, retry=_RETRY)
    try:
        return puller.pull(Reference.parse(weights))
    except ModelUnavailable as error:
        raise ModelUnavailable(f"COG_WEIGHTS: {error.detail}") from error


def _download(url: str, name: str, downloads: Path) -> Path:
    """Download `url` to a file named after its hash; a complete one is not downloaded again."""
    target = downloads / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.tar"
    if not target.is_file():
        _log.info("Downloading %s", name)
    try:
        return fetch(url, target, retry=_RETRY)
    except ModelUnavailable as error:
        detail = error.detail.removeprefix(f"{name}: ")
        raise ModelUnavailable(f"COG_WEIGHTS={name!r}: {detail}") from error
