"""Runs all checks, in the order in which serving needs them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cog_triton.artifact import cuda_support
from cog_triton.artifact.compatibility import Machine, backends_in, library_versions
from cog_triton.doctor import engine_check, fit_checks, hardware, software
from cog_triton.doctor.report import Check, fail, ok
from cog_triton.errors import CogTritonError, EngineIncompatible, TritonStartFailed
from cog_triton.settings import Settings, load_settings
from cog_triton.system.gpus import visible_gpus
from cog_triton.system.ports import OPENAI_PORT
from cog_triton.triton import installation
from cog_triton.triton.installation import TritonInstallation
from cog_triton.triton.serve_config import find_serve_config


def run(wanted: str | None, before: str | None = None) -> list[Check]:
    """Check this machine, and `wanted`, else COG_WEIGHTS or ENGINE_DIR if they are local.

    `wanted` is an engine, or a model that none has been made of yet. With `before`, an image, an
    engine or a model, nothing is checked but whether that fits, before it is fetched.
    """
    if before is not None:
        try:
            return list(fit_checks.run(before, load_settings(), _gpus()))
        except CogTritonError as error:
            return [fail("settings", error.detail, "correct it in the environment")]
    with tempfile.TemporaryDirectory() as scratch:
        return list(_checks(wanted, Path(scratch)))


def _checks(wanted: str | None, scratch: Path) -> Iterator[Check]:
    yield software.python()
    try:
        own = {} if "OPENAI_PORT" in os.environ else {"openai_port": OPENAI_PORT}
        settings = load_settings(**own)
        find_serve_config(settings.cog_triton_config)
    except CogTritonError as error:
        yield fail("settings", error.detail, "correct it in the environment or the file")
        return
    yield ok("settings", "valid")
    triton, why_not = _triton(settings, scratch)
    yield software.libpython(triton)
    yield software.tritonserver(triton, why_not)
    if triton is not None:
        yield software.backends(triton)
    gpus = _gpus()
    yield hardware.gpu(settings.cog_triton_sm, gpus)
    here = [] if isinstance(gpus, EngineIncompatible) else gpus
    if here or settings.cog_triton_sm not in (None, "", "cpu"):
        yield software.cuda_driver(cuda_support.cuda_of_image(), "this image", compat=False)
    model = wanted if wanted is not None and fit_checks.is_model(wanted) else None
    path = _configured(settings) if wanted is None else None if model else Path(wanted)
    needs, checked = None, None
    if path is not None:
        needs, checked = engine_check.check(path, _machine(triton, here))
    ranks = settings.world_size or (needs.world_size if needs else 0)
    yield software.mpirun(settings, ranks)
    yield hardware.memory()
    yield hardware.shared_memory(ranks)
    packed = path.stat().st_size if path is not None and path.is_file() else 0
    yield hardware.disk(settings.work_dir, packed)
    yield software.compiler_caches(settings)
    yield hardware.predictions()
    cog = {"PORT": (settings.cog_host, settings.port)}
    yield from hardware.free_ports({**cog, **settings.http_ports, **settings.triton_ports})
    if checked is not None:
        yield checked
    sealed = engine_check.check_seals(path, settings) if path is not None and needs else None
    if sealed is not None:
        yield sealed
    if model is not None:
        fits = fit_checks.run(model, settings, gpus)
        yield from (check for check in fits if check.name == "model")


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


def _configured(settings: Settings) -> Path | None:
    """Engine that the environment names, if it is on this machine."""
    weights = settings.cog_weights
    if weights:
        return None if "://" in weights else Path(weights)
    return settings.engine_dir if settings.engine_dir.is_dir() else None
