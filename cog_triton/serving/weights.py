"""Engine weights (COG_WEIGHTS): downloaded and unpacked once, reused on later starts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.download.object_store import SCHEMES
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.url_download import fetch, redacted_name
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.oci.reference import Reference, is_oci
from cog_triton.settings import Settings
from cog_triton.system.redaction import redact_address

_log = logging.getLogger(__name__)


async def engine_directory(
    settings: Settings,
    weights: str | None,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> Path:
    """The engine directory to serve: ENGINE_DIR, or the unpacked `weights` if given.

    `weights` is a directory, the path or URL of an engine.tar, or oci://REF.
    Raises E1304 when they cannot be found, E1306 when they are corrupt, E2302 when the disk is
    full. An interrupted download is resumed.
    """
    if not weights:
        return settings.engine_dir
    if is_oci(weights):
        return await _pull(settings, weights, retry)
    engines = settings.work_dir / "engines"
    if "://" not in weights:
        tar = Path(weights)
    else:
        url = _parse_url(weights)
        if url.scheme != "file":
            tar = await _download(
                weights, redacted_name(weights), settings.work_dir / "downloads", retry
            )
            try:
                return await asyncio.to_thread(_unpack, tar, engines)
            except EngineCorrupt:
                tar.unlink(missing_ok=True)  # so that the next start downloads it again
                raise
        tar = Path(unquote(url.path))
    if tar.is_dir():
        return tar
    if not tar.is_file():
        raise ModelUnavailable(
            f"COG_WEIGHTS={redact_address(weights)!r}: no such file or directory"
        )
    return await asyncio.to_thread(_unpack, tar, engines)


def _parse_url(weights: str) -> SplitResult:
    try:
        url = urlsplit(weights)
        _ = url.port  # a password with a bare # or / in it ends up there
    except ValueError:
        raise ModelUnavailable("COG_WEIGHTS=...: is not a valid URL") from None
    if url.scheme in ("http", "https", *SCHEMES) or (
        url.scheme == "file" and url.netloc in ("", "localhost")
    ):
        return url
    raise ModelUnavailable(
        f"COG_WEIGHTS={redact_address(weights)!r}: must be a path, a file:///path, http(s)://,"
        " s3://, gs:// or az:// URL, or oci://REF"
    )


def _unpack(tar: Path, engines: Path) -> Path:
    stat = tar.stat()
    identity = f"{tar.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    target = engines / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if target.is_dir():
        manifest = engine_manifest.load(target)
        if manifest is not None:
            engine_manifest.verify(target, manifest, checksums=False)
        return target
    engines.mkdir(parents=True, exist_ok=True)
    _log.info("Unpacking %s (%.0f MB)", tar, stat.st_size / 1e6)
    unpacked = engine_tar.unpack(tar, target)
    for warning in unpacked.warnings:
        _log.warning("%s", warning)
    return target


async def _pull(settings: Settings, weights: str, retry: RetryPolicy) -> Path:
    """The engine that `weights`, oci://REF, is in its registry now."""
    from cog_triton.oci.engine_pull import Puller  # most servers do without

    stop = threading.Event()
    try:
        puller = Puller(
            settings.work_dir,
            _log.info,
            stop,
            plain_http=settings.plain_http_registries,
            retry=retry,
        )
        return await asyncio.to_thread(puller.pull, Reference.parse(weights))
    except ModelUnavailable as error:
        raise ModelUnavailable(f"COG_WEIGHTS: {error.detail}") from error
    finally:
        stop.set()  # also when this task is cancelled, which does not stop the thread


async def _download(url: str, name: str, downloads: Path, retry: RetryPolicy) -> Path:
    """Download `url` to a file named after its hash; a complete one is not downloaded again."""
    target = downloads / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.tar"
    if not target.is_file():
        _log.info("Downloading %s", name)
    stop = threading.Event()
    try:
        return await asyncio.to_thread(fetch, url, target, retry=retry, stop=stop)
    except ModelUnavailable as error:
        detail = error.detail.removeprefix(f"{name}: ")
        raise ModelUnavailable(f"COG_WEIGHTS={name!r}: {detail}") from error
    finally:
        stop.set()  # also when this task is cancelled, which does not stop the thread
