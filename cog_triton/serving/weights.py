"""From COG_WEIGHTS to an engine directory: fetched and unpacked once, reused on the next start."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

import httpx

from cog_triton import engine_manifest, engine_tar
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.settings import Settings
from cog_triton.urls import shown


async def engine_directory(settings: Settings, weights: str | None) -> Path:
    """The directory to serve: ENGINE_DIR, or the unpacked `weights` when they are given.

    `weights` is a directory, or the path, file:// or http(s):// URL of an engine.tar. Raises
    E1304 when there is nothing, E1306 when it is damaged.
    """
    if not weights:
        return settings.engine_dir
    engines = settings.work_dir / "engines"
    if "://" not in weights:
        tar = Path(weights)
    else:
        url = _parse(weights)
        if url.scheme != "file":
            tar = await _download(weights, shown(weights), settings.work_dir / "downloads")
            try:
                return await asyncio.to_thread(_unpack, tar, engines)
            except EngineCorrupt:
                tar.unlink(missing_ok=True)  # the next start may be answered better
                raise
        tar = Path(unquote(url.path))
    if tar.is_dir():
        return tar
    if not tar.is_file():
        raise ModelUnavailable(f"COG_WEIGHTS={weights!r}: no such file or directory")
    return await asyncio.to_thread(_unpack, tar, engines)


def _parse(weights: str) -> SplitResult:
    try:
        url = urlsplit(weights)
    except ValueError as error:
        raise ModelUnavailable(f"COG_WEIGHTS={weights!r}: {error}") from error
    if url.scheme in ("http", "https") or (
        url.scheme == "file" and url.netloc in ("", "localhost")
    ):
        return url
    raise ModelUnavailable(
        f"COG_WEIGHTS={weights!r}: must be a path, or a file:///path or http(s):// URL"
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
    print(f"Unpacking {tar} ({stat.st_size / 1e6:.0f} MB)", flush=True)
    unpacked = engine_tar.unpack(tar, target)
    for warning in unpacked.warnings:
        print(f"Warning: {warning}", flush=True)
    return target


async def _download(url: str, name: str, downloads: Path) -> Path:
    """Stream `url` to a file named after it; a finished one is not fetched again."""
    target = downloads / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.tar"
    if target.is_file():
        return target
    downloads.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    print(f"Downloading {name}", flush=True)
    try:
        async with (
            httpx.AsyncClient(follow_redirects=True, timeout=60) as client,
            client.stream("GET", url) as response,
        ):
            response.raise_for_status()
            with partial.open("wb") as file:
                async for chunk in response.aiter_raw():
                    file.write(chunk)
        expected = response.headers.get("content-length")
        if expected is not None and partial.stat().st_size != int(expected):
            raise ModelUnavailable(
                f"COG_WEIGHTS={name!r}: got {partial.stat().st_size} of {expected} bytes"
            )
        partial.replace(target)
    except httpx.HTTPStatusError as error:  # its text holds the whole URL
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        raise ModelUnavailable(f"COG_WEIGHTS={name!r}: HTTP {status}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelUnavailable(f"COG_WEIGHTS={name!r}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return target
