"""Downloads from the Hugging Face hub, into the hub library's own cache.

The library lists a repository, fetches the small files and lays out the cache. The large files are
put into that cache by `fetch`: huggingface_hub 2.4 starts a file over after a failure, and does not
check its sha256.
"""

from __future__ import annotations

import errno
import glob
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_token,
    hf_hub_download,
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

from cog_triton.download import disk_space, hub_cache
from cog_triton.download.hub_cache import File, Listing, choose
from cog_triton.download.model_request import FetchedModel, ModelRequest
from cog_triton.download.retry import Backoff, RetryPolicy, TransientError, is_transient
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.download.url_download import fetch as fetch_url
from cog_triton.errors import BuildCancelled, CogTritonError, DiskFull, ModelUnavailable

LIBRARY_ERRORS = (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError, RuntimeError)
"""Exceptions of huggingface_hub, to be given to `coded`."""
OFFLINE = "HF_HUB_OFFLINE is set"
_LISTING_TIMEOUT_S = 20.0
_COUNTED_BAR = "huggingface_hub.snapshot_download"
_Result = TypeVar("_Result")


def coded(error: BaseException, request: ModelRequest) -> CogTritonError | TransientError:
    """The error to raise in place of `error`, which came while `request` was fetched."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    # The first cause is the most specific one.
    for one in reversed(found):
        known = _known(one, request)
        if known is not None:
            return known
    text = f"{type(error).__name__}: {error}"
    return ModelUnavailable(f"{request.model_id}: {redact_tokens(text, request.token)}")


def _known(error: BaseException, request: ModelRequest) -> CogTritonError | TransientError | None:
    name, hub = request.model_id, constants.ENDPOINT
    token = request.token or get_token()
    if isinstance(error, GatedRepoError):
        with_token = "the token's account" if token else "your account, and give its hf_token"
        return ModelUnavailable(
            f"{name} is gated: accept its licence at {hub}/{name} with {with_token}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelUnavailable(f"{name} has no revision {request.revision or 'main'!r} on {hub}")
    if isinstance(error, RepositoryNotFoundError):
        return _not_found(name, hub, token)
    if isinstance(error, DisabledRepoError):
        return ModelUnavailable(f"{name} has been disabled on {hub}")
    if isinstance(error, HFValidationError):
        return ModelUnavailable(f"model_id {name!r} is no Hugging Face model's: must be ORG/NAME")
    if isinstance(error, HfHubHTTPError):
        return _status(error.response.status_code, name, hub, token)
    if isinstance(error, OfflineModeIsEnabled):
        return TransientError(OFFLINE)
    if isinstance(error, httpx2.TransportError):
        text = redact_tokens(str(error) or type(error).__name__, request.token)
        return TransientError(f"{hub} is unreachable: {text}")
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"{name}: {constants.HF_HUB_CACHE} is full")
        if "Consistency check failed" in str(error):
            return TransientError("a file came in with another size than the hub gave")
    return None


def _not_found(name: str, hub: str, token: str | None) -> ModelUnavailable:
    may = "or the token may not read it" if token else "or it is private: give hf_token"
    return ModelUnavailable(f"{hub} has no model {name}, {may}")


def _status(status: int, name: str, hub: str, token: str | None) -> CogTritonError | TransientError:
    if is_transient(status):
        return TransientError(f"{hub} answers HTTP {status}")
    if status == 401 and token:
        return ModelUnavailable(f"{name}: {hub} does not take the hf_token (HTTP 401)")
    if status == 403:
        return ModelUnavailable(f"{name}: {hub} does not let this hf_token read it (HTTP 403)")
    if status in (401, 404):
        return _not_found(name, hub, token)
    return ModelUnavailable(f"{name}: {hub} answers HTTP {status}")


def redact_tokens(text: str, token: str | None) -> str:
    """`text` with every hub token of this request and machine replaced."""
    for secret in {token, get_token()} - {None, ""}:
        text = text.replace(str(secret), "***")
    return text


@contextmanager
def relayed_log(echo: Echo, request: ModelRequest) -> Iterator[None]:
    """Relays the library's log to `echo`, tokens redacted, in place of stderr."""

    class Relay(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = redact_tokens(record.getMessage(), request.token)
            echo(f"[download] {request.model_id}: {' '.join(text.split())}")

    logger = logging.getLogger("huggingface_hub")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Relay()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


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
            known = coded(error, request)
            if isinstance(known, TransientError):
                known = ModelUnavailable(f"{request.model_id}: {known}")
            raise known from None


def contents(
    request: ModelRequest, store: Path, echo: Echo, retry: RetryPolicy, stop: threading.Event
) -> Listing:
    """List every file of the repository, whatever the request selects, at the commit it is at now.

    Raises:
        ModelUnavailable, BuildCancelled: as `fetch`.
    """
    with relayed_log(echo, request):
        work = _Fetch(request, store, echo, retry, stop)
        return work.with_retries(lambda: _contents(request), work.new_backoff(lambda: 0))


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

    def run(self, here: FetchedModel | None) -> FetchedModel:
        """Fetch it, or return what is `here` of a moving revision if the hub cannot be reached."""
        backoff = self.new_backoff(lambda: 0)
        try:
            listing = self.with_retries(
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
        backoff = self.new_backoff(lambda: progress.done)
        large = {}
        for name, file in listing.files.items():
            if hub_cache.pointer(self.name, listing.commit, name) is not None:
                progress.skip(file.size)
            elif file.sha256 is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                large[name] = file.sha256
        # The small ones first: a gated or forbidden repository shows at once.
        small = listing.files.keys() - large.keys()
        if small:
            self.with_retries(lambda: self._snapshot(listing, small, progress), backoff)
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
            self.with_retries(lambda: self._snapshot(listing, listing.files, progress), backoff)

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

    def with_retries(self, action: Callable[[], _Result], backoff: Backoff | None) -> _Result:
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

    def new_backoff(self, received: Callable[[], int]) -> Backoff:
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
