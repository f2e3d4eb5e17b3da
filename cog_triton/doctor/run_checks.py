"""Runs all checks, in the order in which serving needs them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cog_triton.artifact import cuda_support
from cog_triton.artifact.compatibility import Machine, backends_in, library_versions
from cog_triton.doctor import machine, subject
from cog_triton.doctor.report import Check, fail, ok
from cog_triton.download.retry import RetryPolicy
from cog_triton.errors import CogTritonError, EngineIncompatible, TritonStartFailed
from cog_triton.settings import Settings, load_settings
from cog_triton.sources.source import Network, Source
from cog_triton.system.gpus import visible_gpus
from cog_triton.system.ports import OPENAI_PORT
from cog_triton.triton import installation
from cog_triton.triton.installation import TritonInstallation
from cog_triton.triton.serve_config import find_serve_config


def run(wanted: str | None, before: str | None = None) -> list[Check]:
    """Check this machine, and `wanted`, else COG_WEIGHTS or ENGINE_DIR if they are local.

    `wanted` is all that `serve` takes. With `before`, which may be an image, too, nothing is
    checked but whether that fits, before it is fetched.
    """
    if before is None:
        with tempfile.TemporaryDirectory() as scratch:
            return list(_checks(wanted, Path(scratch)))
    try:
        settings = load_settings()
    except CogTritonError as error:
        return [fail("settings", error.detail, "correct it in the environment")]
    source = _source(before, settings, images=True)
    if isinstance(source, Check):
        return [source]
    return list(subject.before(source, settings, _gpus()))


def _source(name: str, settings: Settings, *, images: bool = False) -> Source | Check:
    network = Network(plain_http=settings.plain_http_registries, retry=RetryPolicy(1, 1))
    try:
        return Source.open(name, network, images=images)
    except CogTritonError as error:
        return subject.unknown(None, error)


def _checks(wanted: str | None, scratch: Path) -> Iterator[Check]:
    yield machine.python()
    try:
        own = {} if "OPENAI_PORT" in os.environ else {"openai_port": OPENAI_PORT}
        settings = load_settings(**own)
        find_serve_config(settings.cog_triton_config)
    except CogTritonError as error:
        yield fail("settings", error.detail, "correct it in the environment or the file")
        return
    yield ok("settings", "valid")
    triton, why_not = _triton(settings, scratch)
    yield machine.libpython(triton)
    yield machine.tritonserver(triton, why_not)
    if triton is not None:
        yield machine.backends(triton)
    gpus = _gpus()
    yield machine.gpu(settings.cog_triton_sm, gpus)
    here = [] if isinstance(gpus, EngineIncompatible) else gpus
    if here or settings.cog_triton_sm not in (None, "", "cpu"):
        yield machine.cuda_driver(cuda_support.cuda_of_image(), "this image", compat=False)
    named = wanted if wanted is not None else _configured(settings)
    found = None if named is None else _source(named, settings)
    source, checked = (None, found) if isinstance(found, Check) else (found, None)
    needs = None
    if source is not None and source.is_engine:
        needs, checked = subject.engine(source, _machine(triton, here))
    ranks = settings.world_size or (needs.world_size if needs else 0)
    yield machine.mpirun(settings, ranks)
    yield machine.memory()
    yield machine.shared_memory(ranks)
    packed = source.path if source is not None and source.kind == "tar" else None
    yield machine.disk(settings.work_dir, packed.stat().st_size if packed else 0)
    yield machine.compiler_caches(settings)
    yield machine.predictions()
    cog = {"PORT": (settings.cog_host, settings.port)}
    yield from machine.free_ports({**cog, **settings.http_ports, **settings.triton_ports})
    if checked is not None:
        yield checked
    if source is not None and needs is not None:
        yield from filter(None, [subject.seals(source, settings)])
    if source is not None and not source.is_engine:
        try:
            yield subject.memory(subject.target(source, settings.work_dir))
        except CogTritonError as error:
            yield subject.unknown(source, error)


def _triton(
    settings: Settings, scratch: Path
) -> tuple[TritonInstallation | None, TritonStartFailed | None]:
    try:
        return installation.find_installation(
            scratch, settings.tritonserver, settings.tritonserver_backend_dir
        ), None
    except TritonStartFailed as error:
        return None, error


def _gpus() -> list[int] | EngineIncompatible:
    try:
        return visible_gpus()
    except EngineIncompatible as error:
        return error


def _machine(triton: TritonInstallation | None, sm: Sequence[int]) -> Machine | None:
    if triton is None:
        return None
    backends = backends_in(triton.backend_directory)
    return Machine(sm, triton.binary, backends, library_versions())


def _configured(settings: Settings) -> str | None:
    """Engine that the environment names, if it is on this machine."""
    if weights := settings.cog_weights:
        return None if "://" in weights else weights
    return str(settings.engine_dir) if settings.engine_dir.is_dir() else None
