"""Downloads from the Hugging Face hub, into the hub library's own cache.

The library lists a repository, fetches the small files and lays out the cache. The large files are
put into that cache by `fetch`: huggingface_hub 2.4 starts a file over after a failure, and does not
check its sha256.
"""

from __future__ import annotations

import errno
import glob
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_token,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from cog_triton.artifact.engine_manifest import File
from cog_triton.download import disk_space, hub_cache
from cog_triton.download.hub_cache import Listing, choose
from cog_triton.download.model_request import FetchedModel, ModelRequest, config_of
from cog_triton.download.retry import Backoff, RetryPolicy, TransientError, is_transient
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.download.url_download import fetch as fetch_url
from cog_triton.errors import CogTritonError, DiskFull, ModelUnavailable

_LIBRARY_ERRORS = (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError, RuntimeError)
_LISTING_TIMEOUT_S = 20.0
_Result = TypeVar("_Result")

# Its lines may have the token, and its errors say the same.
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


def fetch(
    request: ModelRequest, store: Path, echo: Echo, retry: RetryPolicy, stop: threading.Event
) -> FetchedModel:
    """Download the files of `request`; returns a directory of links into the hub's cache.

    Without the network, the cached commit of a branch or tag is used; a cached commit needs none.

    Raises:
        ModelUnavailable: says which: gated, missing, unreachable, and what to do.
        DiskFull: the files do not fit; before the first is fetched.
        BuildCancelled: `stop` was set.
    """
    with disk_space.coded_errors(store, request.model_id):
        here = hub_cache.locate(request, store)
        if here is None and (found := hub_cache.cached_listing(request)) is not None:
            here = hub_cache.make_view(request, found, store)
        if here is not None and hub_cache.is_commit(request.revision):
            return here
        return _Fetch(request, echo, retry, stop).run(store, here)


def size(request: ModelRequest, store: Path) -> int | None:
    """Bytes that `fetch` would download; None if the hub is not reachable now. One attempt."""
    try:
        here = hub_cache.locate(request, store)
        if here is not None and hub_cache.is_commit(request.revision):
            return 0
        return hub_cache.missing_bytes(request.model_id, _listing(request))
    except Exception:  # noqa: BLE001  `fetch` reports it
        return None


def config(request: ModelRequest) -> dict[str, Any]:
    """config.json of the model, after one attempt; raises as `fetch`."""
    asked = replace(request, files=("config.json",), weight_format=None)
    with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
        found = fetch(asked, Path(scratch), lambda _: None, RetryPolicy(1, 1), threading.Event())
        return config_of((found.path / "config.json").read_bytes(), request.model_id)


def contents(
    request: ModelRequest, echo: Echo, retry: RetryPolicy, stop: threading.Event
) -> Listing:
    """List every file of the repository, whatever the request selects, at the commit it is at now.

    Raises:
        ModelUnavailable, BuildCancelled: as `fetch`.
    """
    return _Fetch(request, echo, retry, stop).retried(lambda: _contents(request))


@dataclass(frozen=True)
class _Fetch:
    request: ModelRequest
    echo: Echo
    policy: RetryPolicy
    stop: threading.Event

    def run(self, store: Path, here: FetchedModel | None) -> FetchedModel:
        """Fetch it, or return what is `here` of a moving revision if the hub cannot be reached."""
        request, name = self.request, self.request.model_id
        if here is None:
            listing = self.retried(lambda: _listing(request))
        else:
            try:
                listing = _once(request, lambda: _listing(request))
            except TransientError as error:
                self.echo(f"[download] {name}: {error}; taking what is here, {here.revision}")
                return here
        missing = hub_cache.missing_bytes(name, listing)
        disk_space.require(Path(constants.HF_HUB_CACHE), missing, name)
        total = _size(listing.files, listing.files)
        with Progress(name, self.echo, total) as progress:
            self._fetch(listing, progress)
        hub_cache.write_ref(request, listing.commit)
        return hub_cache.make_view(request, listing, store)

    def _fetch(self, listing: Listing, progress: Progress) -> None:
        name, files = self.request.model_id, listing.files
        lacking = [n for n in files if hub_cache.pointer(name, listing.commit, n) is None]
        progress.skip(_size(files, files) - _size(files, lacking))
        most = constants.MAX_HTTP_DOWNLOAD_SIZE
        large = {n: s for n in lacking if (s := files[n].sha256) and files[n].size <= most}
        # The small ones first: a gated or forbidden repository shows at once.
        small = [path for path in lacking if path not in large]
        self._snapshot(listing, small, progress)
        progress.advance(_size(files, small))
        headers = build_hf_headers(token=self.request.token)
        for path, sha256 in large.items():
            fetch_url(
                hf_hub_url(name, path, revision=listing.commit),
                hub_cache.blob(name, sha256),
                sha256=sha256,
                headers=headers,
                echo=self.echo,
                progress=progress,
                retry=self.policy,
                stop=self.stop,
            )
        self._snapshot(listing, large, progress)

    def _snapshot(self, listing: Listing, names: Iterable[str], progress: Progress) -> None:
        """Have the library fetch what its cache lacks of `names`, and lay it out."""
        patterns = [glob.escape(name) for name in names]

        def snapshot() -> str:
            return snapshot_download(
                self.request.model_id,
                revision=listing.commit,
                allow_patterns=patterns,
                token=self.request.token,
                tqdm_class=_SilentBar,
            )

        if patterns:
            self.retried(snapshot, lambda: progress.done)

    def retried(self, action: Callable[[], _Result], received: Callable[[], int] = int) -> _Result:
        """Result of `action`, which is done again after transient errors of the library."""
        name = self.request.model_id

        def once() -> _Result:
            try:
                return _once(self.request, action)
            except TransientError as error:
                if constants.is_offline_mode():
                    raise ModelUnavailable(f"{name}: is not all here, and {error}") from None
                raise

        return Backoff(self.policy, name, self.echo, received, self.stop).retried(once)


def _size(files: Mapping[str, File], names: Iterable[str]) -> int:
    return sum(files[name].size for name in names)


def _listing(request: ModelRequest) -> Listing:
    whole = _contents(request)
    names = choose(whole.files, request.files, request.weight_format, request.model_id)
    return Listing(whole.commit, {name: whole.files[name] for name in names})


def _contents(request: ModelRequest) -> Listing:
    info = HfApi(token=request.token).model_info(
        request.model_id,
        revision=request.revision,
        files_metadata=True,
        timeout=_LISTING_TIMEOUT_S,
    )
    if info.sha is None:
        raise ModelUnavailable(f"{request.model_id}: {constants.ENDPOINT} names no commit")
    files = {
        found.rfilename: File(found.size or 0, found.lfs.sha256 if found.lfs else None)
        for found in info.siblings or []
    }
    return Listing(info.sha, files)


def _once(request: ModelRequest, action: Callable[[], _Result]) -> _Result:
    """Result of `action`; the library's errors are coded or transient ones, without a token."""
    try:
        return action()
    except _LIBRARY_ERRORS as error:
        chain: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in chain:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        # The first cause is the most specific one.
        known = next(filter(None, (_coded(one, request) for one in reversed(chain))), None)
        text = f"{request.model_id}: {type(error).__name__}: {error}"
        raise known or ModelUnavailable(_without_tokens(text, request)) from None


def _coded(error: BaseException, request: ModelRequest) -> CogTritonError | TransientError | None:
    name, hub, token = request.model_id, constants.ENDPOINT, request.token or get_token()
    text = None
    if isinstance(error, GatedRepoError):
        account = "the token's account" if token else "your account, and give its hf_token"
        text = f"{name} is gated: accept its licence at {hub}/{name} with {account}"
    elif isinstance(error, RevisionNotFoundError):
        text = f"{name} has no revision {request.revision or 'main'!r} on {hub}"
    elif isinstance(error, DisabledRepoError):
        text = f"{name} has been disabled on {hub}"
    elif isinstance(error, HFValidationError):
        text = f"model_id {name!r} is no Hugging Face model's: must be ORG/NAME"
    elif isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        missing = isinstance(error, RepositoryNotFoundError)
        if is_transient(status):
            return TransientError(f"{hub} answers HTTP {status}")
        if not missing and (status == 403 or (status == 401 and token)):
            text = f"{name}: {hub} does not let this hf_token read it (HTTP {status})"
        elif missing or status in (401, 404):
            may = "or the token may not read it" if token else "or it is private: give hf_token"
            text = f"{hub} has no model {name}, {may}"
        else:
            text = f"{name}: {hub} answers HTTP {status}"
    elif isinstance(error, OfflineModeIsEnabled):
        return TransientError("HF_HUB_OFFLINE is set")
    elif isinstance(error, httpx2.TransportError):
        why = _without_tokens(str(error) or type(error).__name__, request)
        return TransientError(f"{hub} is unreachable: {why}")
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{name}: {constants.HF_HUB_CACHE} is full")
    elif isinstance(error, OSError) and "Consistency check failed" in str(error):
        return TransientError("a file came in with another size than the hub gave")
    return ModelUnavailable(text) if text else None


def _without_tokens(text: str, request: ModelRequest) -> str:
    for secret in {request.token, get_token()} - {None, ""}:
        text = text.replace(str(secret), "***")
    return text


class _SilentBar(tqdm):
    monitor_interval = 0  # no thread to draw what is not shown

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
