"""Model source: the hub, a tar, an installed package, or a path."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from cog_triton.download.model_request import FetchedModel, ModelRequest, is_hub_id, resolve
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import ModelUnavailable
from cog_triton.system.redaction import redact_address

if TYPE_CHECKING:
    from cog_triton.download.model_tar import ModelTar

# The hub and tars are imported where they are used: most builds do without, and they take time.


def fetch_model(
    request: ModelRequest,
    store: Path,
    echo: Echo,
    *,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
    stop: threading.Event | None = None,
) -> FetchedModel:
    """Fetch the model of `request`; it is downloaded if it is not here.

    A tar, if there is one, is the model. Else a `model_id` that is there as a path is one, as is
    one that is written like one (``./``, ``/``, ``~``); any other ORG/NAME is the hub's.

    Args:
        store: where what is downloaded is kept for the next build; made if missing.
        stop: ends a download from another thread.

    Raises:
        ModelUnavailable: it cannot be had; says which one, why, and what to do.
        EngineCorrupt: the tar is broken, or has an unsafe member.
        DiskFull: there is no room for it.
        BuildCancelled: `stop` was set.
    """
    stop = stop or threading.Event()
    if (tar := _tar(request, store)) is not None:
        return tar.fetch(echo, retry, stop)
    if is_hub_id(request.model_id):
        from cog_triton.download import hub

        return hub.fetch(request, store, echo, retry, stop)
    return FetchedModel(resolve(request.model_id), None)


def locate(request: ModelRequest, store: Path) -> FetchedModel | None:
    """Find the model if `fetch_model` needs no download, else None. No network, nothing written.

    Of a branch or tag of the hub it is what was there at the last download.

    Raises:
        ModelUnavailable: the request contradicts itself, or its path or package is not there.
    """
    if (tar := _tar(request, store)) is not None:
        return tar.locate()
    if is_hub_id(request.model_id):
        from cog_triton.download import hub_cache

        return hub_cache.locate(request, store)
    return FetchedModel(resolve(request.model_id), None)


def size(request: ModelRequest, store: Path) -> int | None:
    """Bytes that `fetch_model` would download; None if unknown. Asks once, and never fails."""
    try:
        tar = _tar(request, store)
    except ModelUnavailable:
        return None
    if tar is not None:
        return tar.size()
    if is_hub_id(request.model_id):
        from cog_triton.download import hub

        return hub.size(request, store)
    return 0


def _tar(request: ModelRequest, store: Path) -> ModelTar | None:
    """The tar if that is the source; keys that would be ignored are refused."""
    url, sha256 = request.model_tar_url, request.model_tar_sha256
    if url is None and sha256 is not None:
        raise ModelUnavailable("model_tar_sha256 is given without model_tar_url")
    if url is not None or not is_hub_id(request.model_id):
        for key in ("revision", "files", "weight_format"):
            if getattr(request, key) is not None:
                source = "a tar" if url is not None else repr(redact_address(request.model_id))
                raise ModelUnavailable(f"{key} is for Hugging Face models, and {source} is none")
    if url is None:
        return None
    from cog_triton.download.model_tar import ModelTar

    return ModelTar(url, sha256, store)
