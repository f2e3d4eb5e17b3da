"""Adapter source: a directory, a tar at a URL, or a repository of the hub, as a directory."""

from __future__ import annotations

from pathlib import Path

from cog_triton.artifact.lora_adapter import CONFIG_FILE, FILES
from cog_triton.download.model_request import FetchedModel, ModelRequest, is_hub_id
from cog_triton.download.model_source import fetch_model, size
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
    name = source
    if "://" in source:
        from cog_triton.download.url_download import redacted_name  # takes its time

        name = redacted_name(source)
        request = ModelRequest(source, model_tar_url=source, model_tar_sha256=sha256)
    elif (path := base / expanded(source)).is_dir():
        return FetchedModel(path, None)
    elif is_hub_id(source):
        request = ModelRequest(source, revision, files=FILES, token=token)
    else:
        raise ModelUnavailable(
            f"{redact_address(source)!r}: no such directory; an adapter is a directory, a URL of a"
            " tar, or ORG/NAME of the hub"
        )
    count = size(request, store)
    if count is not None and count > max_bytes:
        raise ModelUnavailable(f"{name}: {count} bytes; at most {max_bytes} are taken")
    fetched = fetch_model(request, store, echo, retry=retry)
    if request.model_tar_url is None:
        return fetched
    found = [path.parent for path in fetched.path.rglob(CONFIG_FILE)]
    if len(found) != 1:
        raise ModelUnavailable(f"{name}: holds {len(found)} {CONFIG_FILE}; must hold one")
    return FetchedModel(found[0], fetched.revision)
