"""Downloads from the Hugging Face hub, into the hub library's own cache.

The library lists a repository, fetches the small files and lays out the cache. The large files are
put into that cache by `fetch`: huggingface_hub 2.4 starts a file over after a failure, and does not
check its sha256.
"""

from __future__ import annotations

import glob
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from cog_triton.download import disk_space, hub_cache
from cog_triton.download.file_selection import choose
from cog_triton.download.hub_cache import File, Listing
from cog_triton.download.hub_errors import LIBRARY_ERRORS, coded, relayed_log
from cog_triton.download.model_request import FetchedModel, ModelRequest
from cog_triton.download.retry import Backoff, RetryPolicy, TransientError
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.download.url_download import fetch as fetch_url
from cog_triton.errors import BuildCancelled, CogTritonError, ModelUnavailable

_LISTING_TIMEOUT_S = 20.0
_COUNTED_BAR = "huggingface_hub.snapshot_download"
_Result = TypeVar("_Result")


def fetch(
    request: ModelRequest, store: Path, echo: Echo, retry: RetryPolicy, stop: threading.Event
) -> FetchedModel:
    """Download the files of `request`; returns a directory of links into the hub's cache.

    Without the network, the cached commit of a branch or tag is used; a cached commit needs none.

    Args:
        stop: cancels from another thread.

    Raises:
        ModelUnavailable: says which: gated, missing, unreachable, and what to do.
        DiskFull: the files do not fit; before the first is fetched.
        BuildCancelled: `stop` was set.
    """
    with relayed_log(echo, request), disk_space.coded_errors(store, request.model_id):
        here = hub_cache.locate(request, store)
        if here is None and (found := hub_cache.cached_listing(request)) is not None:
            here = hub_cache.make_view(request, found, store)
        if here is not None and hub_cache.is_commit(request.revision):
            return here
        return _Fetch(request, store, echo, retry, stop).run(here)


def size(request: ModelRequest, store: Path) -> int | None:
    """Bytes that `fetch` would download; None if the hub is not reachable now. One attempt."""
    try:
        here = hub_cache.locate(request, store)
        if here is not None and hub_cache.is_commit(request.revision):
            return 0
        with relayed_log(lambda _line: None, request):
            return hub_cache.missing_bytes(request.model_id, _listing(request))
    except Exception:  # noqa: BLE001  `fetch` reports it
        return None


def describe(request: ModelRequest) -> tuple[Listing, bytes]:
    """The files that `fetch` would download with their sizes, and config.json. One attempt.

    Raises:
        ModelUnavailable: gated, missing or unreachable, or without config.json.
    """
    with relayed_log(lambda _line: None, request):
        try:
            listing = _listing(request)
            if "config.json" not in listing.files:
                raise ModelUnavailable(f"{request.model_id}: has no config.json")
            path = hf_hub_download(
                request.model_id,
                "config.json",
                revision=listing.commit,
                cache_dir=constants.HF_HUB_CACHE,
                token=request.token,
                endpoint=constants.ENDPOINT,
            )
            return listing, Path(path).read_bytes()
        except LIBRARY_ERRORS as error:
            raise _final(coded(error, request), request) from None


def _final(error: CogTritonError | TransientError, request: ModelRequest) -> CogTritonError:
    if isinstance(error, TransientError):
        return ModelUnavailable(f"{request.model_id}: {error}")
    return error


def contents(
    request: ModelRequest,
    store: Path,
    echo: Echo,
    retry: RetryPolicy,
    stop: threading.Event,
) -> Listing:
    """List every file of the repository, whatever the request selects, at the commit it is at now.

    Raises:
        ModelUnavailable, BuildCancelled: as `fetch`.
    """
    with relayed_log(echo, request):
        return _Fetch(request, store, echo, retry, stop).contents()


@dataclass(frozen=True)
class _Fetch:
    request: ModelRequest
    store: Path
    echo: Echo
    policy: RetryPolicy
    stop: threading.Event

    @property
    def name(self) -> str:
        return self.request.model_id

    def contents(self) -> Listing:
        """See the function `contents`."""
        backoff = self._new_backoff(lambda: 0)
        return self._with_retries(lambda: _contents(self.request), backoff)

    def run(self, here: FetchedModel | None) -> FetchedModel:
        """Fetch it, or return what is `here` of a moving revision if the hub cannot be reached."""
        backoff = self._new_backoff(lambda: 0)
        try:
            listing = self._with_retries(
                lambda: _listing(self.request), backoff if here is None else None
            )
        except TransientError as error:
            assert here is not None
            self.echo(f"[download] {self.name}: {error}; taking what is here, {here.revision}")
            return here
        missing = hub_cache.missing_bytes(self.name, listing)
        disk_space.require(Path(constants.HF_HUB_CACHE), missing, self.name)
        total = sum(file.size for file in listing.files.values())
        with Progress(self.name, self.echo, total) as progress:
            self._fetch(listing, progress)
        hub_cache.write_ref(self.request, listing.commit)
        return hub_cache.make_view(self.request, listing, self.store)

    def _fetch(self, listing: Listing, progress: Progress) -> None:
        backoff = self._new_backoff(lambda: progress.done)
        large = {}
        for name, file in listing.files.items():
            if hub_cache.pointer(self.name, listing.commit, name) is not None:
                progress.skip(file.size)
            elif file.sha256 is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                large[name] = file.sha256
        # The small ones first: a gated or forbidden repository shows at once.
        small = listing.files.keys() - large.keys()
        if small:
            self._with_retries(lambda: self._snapshot(listing, small, progress), backoff)
        headers = build_hf_headers(token=self.request.token)
        for name, sha256 in large.items():
            url = hf_hub_url(self.name, name, revision=listing.commit, endpoint=constants.ENDPOINT)
            fetch_url(
                url,
                hub_cache.blob(self.name, sha256),
                sha256=sha256,
                headers=headers,
                echo=self.echo,
                progress=progress,
                retry=self.policy,
                stop=self.stop,
            )
        if large:
            self._with_retries(lambda: self._snapshot(listing, listing.files, progress), backoff)

    def _snapshot(self, listing: Listing, names: Iterable[str], progress: Progress) -> None:
        snapshot_download(
            self.name,
            revision=listing.commit,
            cache_dir=constants.HF_HUB_CACHE,
            allow_patterns=[glob.escape(name) for name in names],
            token=self.request.token,
            endpoint=constants.ENDPOINT,
            tqdm_class=_counting(progress),
        )

    def _with_retries(self, action: Callable[[], _Result], backoff: Backoff | None) -> _Result:
        """Result of `action`; retried with `backoff`, not at all if that is None.

        Raises:
            TransientError: it failed, and `backoff` is None.
        """
        while True:
            try:
                return action()
            except LIBRARY_ERRORS as error:
                known = coded(error, self.request)
                if backoff is None or not isinstance(known, TransientError):
                    raise known from None
                if constants.is_offline_mode():
                    raise ModelUnavailable(f"{self.name}: is not all here, and {known}") from None
            backoff.wait_after(known)

    def _new_backoff(self, received: Callable[[], int]) -> Backoff:
        def wait(seconds: float) -> None:
            if self.stop.wait(seconds):
                raise BuildCancelled(f"{self.name}: the download was stopped")

        return Backoff(self.policy, self.name, self.echo, received, wait)


def _listing(request: ModelRequest) -> Listing:
    whole = _contents(request)
    names = choose(whole.files, request.files, request.weight_format, request.model_id)
    return Listing(whole.commit, {name: whole.files[name] for name in names})


def _contents(request: ModelRequest) -> Listing:
    api = HfApi(endpoint=constants.ENDPOINT, token=request.token)
    info = api.model_info(
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


def _counting(progress: Progress) -> type[Any]:
    """Class for the library's progress bar: draws nothing, and counts its bytes in `progress`."""

    class Bar(tqdm):
        monitor_interval = 0  # no thread to draw what is not shown

        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            self._counted = name == _COUNTED_BAR
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._counted:
                progress.advance(int(n or 0))

    return Bar
