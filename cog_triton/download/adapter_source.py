"""Adapter source: a directory, a tar at a URL, or a repository of the hub, as a directory."""

from __future__ import annotations

import threading
from pathlib import Path

from cog_triton.artifact.lora_adapter import CONFIG_FILE, FILES
from cog_triton.download import url_download as downloads
from cog_triton.download.model_request import FetchedModel, ModelRequest, is_hub_id
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import ModelUnavailable
from cog_triton.system.paths import expanded
from cog_triton.system.redaction import redact_address


def fetch_adapter(
    source: str,
    base: Path,
    store: Path,
    max_bytes: int,
    echo: Echo,
    *,
    token: str | None = None,
    revision: str | None = None,
    sha256: str | None = None,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> FetchedModel:
    """The directory of an adapter; it is downloaded if it is not here.

    Args:
        source: a path, relative ones from `base`; a URL of a .tar, .tar.gz
            or .tar.zst; or ORG/NAME of the hub, of which two files are fetched.
        store: where what is downloaded is kept.
        max_bytes: of a download; more is refused before it begins, if its size is told.
        token: for the hub.
        revision: branch, tag or commit on the hub.
        sha256: what the tar must have.

    Raises:
        ModelUnavailable: it cannot be had, or is too large; says which one and why.
        EngineCorrupt: the tar is broken, or has an unsafe member.
        DiskFull: there is no room for it.
    """
    if "://" in source:
        from cog_triton.download.model_tar import ModelTar  # takes its time, as the hub does

        name = downloads.redacted_name(source)
        tar = ModelTar(source, sha256, store)
        _require_size(name, tar.size(), max_bytes)
        fetched = tar.fetch(echo, retry, threading.Event())
        return FetchedModel(_only_adapter(fetched.path, source), fetched.revision)
    path = base / expanded(source)
    if path.is_dir():
        return FetchedModel(path, None)
    if not is_hub_id(source):
        raise ModelUnavailable(
            f"{redact_address(source)!r}: no such directory; an adapter is a directory, a URL of a"
            " tar, or ORG/NAME of the hub"
        )
    from cog_triton.download import hub

    request = ModelRequest(source, revision, files=FILES, token=token)
    _require_size(source, hub.size(request, store), max_bytes)
    return hub.fetch(request, store, echo, retry, threading.Event())


def _require_size(name: str, size: int | None, max_bytes: int) -> None:
    if size is not None and size > max_bytes:
        raise ModelUnavailable(f"{name}: {size} bytes; at most {max_bytes} are taken")


def _only_adapter(directory: Path, source: str) -> Path:
    """The one folder of an unpacked tar that has an adapter."""
    found = [path.parent for path in sorted(directory.rglob(CONFIG_FILE))]
    if len(found) != 1:
        raise ModelUnavailable(
            f"{downloads.redacted_name(source)}: holds {len(found)} {CONFIG_FILE}; must hold one"
        )
    return found[0]
