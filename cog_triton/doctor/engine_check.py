"""Check of an engine against this machine, without reading its weights."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cog_triton.artifact import compatibility, engine_config, engine_manifest, tar_members
from cog_triton.artifact.compatibility import Machine, Needs
from cog_triton.artifact.engine_config import CONFIG_NAME, CPU_FAMILIES
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, MAX_TEXT, SEALED_ENGINE
from cog_triton.doctor.report import Check, fail, ok, warn
from cog_triton.engines.registry import FAMILIES, open_engine
from cog_triton.engines.vllm.sealed_caches import SealedManifest, checked_pins
from cog_triton.errors import CogTritonError, EngineCorrupt, EngineIncompatible, ModelUnavailable
from cog_triton.inspection.engine_contents import no_engine
from cog_triton.serving.sealed_engine import unsigned
from cog_triton.settings import Settings
from cog_triton.system.printable import printable

SMALL = (MANIFEST_NAME, CONFIG_NAME)
"""Files that describe an engine."""


def needs_of(path: Path) -> Needs:
    """Requirements of the engine in a directory or tar; only the sizes of its files are compared.

    Raises:
        ModelUnavailable: there is nothing at `path`.
        EngineCorrupt: it is no engine, or a file is missing or of another size.
        CogTritonError: whatever else its family finds wrong.
    """
    if path.is_dir():
        family = open_engine(path)
        return compatibility.needs_of(path, family.backend, family.world_size, family.versions)
    if path.is_file():
        return _of_tar(path)
    raise ModelUnavailable(f"{path}: no such file or directory")


def check(path: Path, here: Machine | None) -> tuple[Needs | None, Check]:
    """The engine's requirements (None if it is none), and whether `here` meets them.

    `here` is None without Triton: then nothing is compared."""
    try:
        needs = needs_of(path)
    except CogTritonError as error:
        return None, fail("engine", str(error), "name an engine that is whole: build or fetch it")
    ranks = f", {needs.world_size} ranks" if needs.world_size > 1 else ""
    found = f"{path}: {needs.backend} backend{ranks}"
    if here is None:
        return needs, warn("engine", f"{found}; not compared", "get a tritonserver first")
    try:
        remarks = compatibility.require_engine(needs, here)
    except EngineIncompatible as error:
        return needs, fail("engine", error.detail, "serve it on the machine that it is for")
    if remarks:
        return needs, warn("engine", f"{found}; {'; '.join(remarks)}", "build it with cog-triton")
    return needs, ok("engine", f"{found}; it fits, and its files' sizes are right")


def check_seals(path: Path, settings: Settings) -> Check | None:
    """Whether compiled code of the engine is used; None if it has none, or is none."""
    try:
        if path.is_dir():
            found = SealedManifest.of(path)
        else:
            text = small_texts(path)[1].get(MANIFEST_NAME)
            found = None if text is None else SealedManifest.parse(text, path)
        if found is None or not found.manifest.seals:
            return None
        why = found.distrust(settings.work_dir, checked_pins(settings.seal_sha256), None)
    except CogTritonError as error:
        return fail("seal", error.detail, "name an engine that is whole")
    sealed = f"for {', '.join(found.manifest.seals)}"
    if why is not None and settings.seal_signer is not None:
        why = f"{why}; {unsigned(settings, settings.seal_signer, None)}"
    if why is not None:
        return warn("seal", f"{sealed}: left unread: {why}", "pin it, if you trust its maker")
    return ok("seal", f"{sealed}: trusted; the start tells whether it fits")


def small_texts(tar: Path, *, cut: bool = False) -> tuple[dict[str, int], dict[str, bytes]]:
    """Sizes of a tar's files, and its config.json and manifest; of its beginning if it is `cut`."""
    sizes, texts = {}, {}
    with contextlib.suppress(EngineCorrupt) if cut else contextlib.nullcontext():
        for member in tar_members.read(tar):
            if member.content is not None:
                sizes[member.name] = member.size
                if member.name in SMALL and member.size <= MAX_TEXT:
                    texts[member.name] = member.content.readall() or b""
    return sizes, texts


def _of_tar(path: Path) -> Needs:
    sizes, texts = small_texts(path)
    if MANIFEST_NAME in texts:
        manifest = engine_manifest.parse(texts[MANIFEST_NAME], f"{path}: {MANIFEST_NAME}")
        for name, entry in manifest.files.items():
            if name not in sizes:
                raise EngineCorrupt(f"{path}: {printable(name)} is in the manifest but missing")
            engine_manifest.check_entry(name, entry, sizes[name], None)
        return _needs(path, manifest.engine, manifest.world_size, manifest.sm, manifest.versions)
    if CONFIG_NAME not in texts:
        raise EngineCorrupt(no_engine(path, sizes))
    config = engine_config.parse(texts[CONFIG_NAME], f"{path}: {CONFIG_NAME}")
    ranks = config.pretrained_config.mapping.ranks
    return _needs(path, config.engine, ranks, [], {config.engine: config.version})


def _needs(path: Path, name: str, ranks: int, sm: list[int], versions: dict[str, str]) -> Needs:
    backends = {family.name: family.backend for family in FAMILIES}
    if name not in backends:
        raise EngineCorrupt(f"{path}: engine: {name!r}: must be one of {', '.join(backends)}")
    return Needs(
        engine=path,
        backend=backends[name],
        world_size=0 if name in (*CPU_FAMILIES, SEALED_ENGINE) else ranks,
        sm=sm,
        versions=versions,
    )
