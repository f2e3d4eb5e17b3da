"""Download of one URL to a file: parallel, resumable, checksummed and atomic."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from cog_triton.artifact.engine_manifest import sha256_of
from cog_triton.download import disk_space, object_store
from cog_triton.download.http_source import HTTPSource, Source
from cog_triton.download.partial_file import PartialFile
from cog_triton.download.retry import RetryPolicy, TransientError
from cog_triton.download.transfer import CONNECTIONS, Transfer
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.errors import ModelUnavailable
from cog_triton.system.paths import expanded
from cog_triton.system.redaction import redact_address, redact_url

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    headers: Mapping[str, str] | None = None,
    echo: Echo = _log.info,
    progress: Progress | None = None,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
    connections: int = CONNECTIONS,
    stop: threading.Event | None = None,
    auth: httpx.Auth | None = None,
    expected_size: int | None = None,
) -> Path:
    """Download `url` to `target`; returns `target`, or the path itself of a local file.

    Pieces come over several connections if the server can do that, and finished pieces are kept
    over an interruption, even by SIGKILL. A second process waits for the first.

    Args:
        url: http(s)://, s3://, gs:// or az://, or file:///path or a path, which is not copied.
        target: a file of this name is taken for the one wanted, unless its sha256 differs.
        sha256: the file's expected checksum, 64 hexadecimal digits; made while it is fetched.
        headers, auth: for the URL's own host only.
        progress: counts this file together with others.
        stop: cancels from another thread.
        expected_size: in bytes; a file of another is refused before it is fetched.

    Raises:
        ModelUnavailable: not to be had, or another sha256; names the URL, redacted.
        MissingExtra: an object store whose package is not installed.
        DiskFull: there is no room for it.
        BuildCancelled: `stop` was set.
    """
    name, wanted = redacted_name(url), sha256 and sha256.lower()
    local = local_path(url)
    if local is not None:
        if not local.is_file():
            raise ModelUnavailable(f"{name}: no such file")
        if wanted is not None:
            echo(f"[download] {name}: checking its sha256")
            _require_checksum(name, sha256_of(local), wanted)
        return local
    stop = stop or threading.Event()
    with disk_space.writing(target, name, echo, stop), contextlib.ExitStack() as stack:
        if target.is_file():
            if wanted is None or sha256_of(target) == wanted:
                return target
            echo(f"[download] {name}: what is here has another sha256; fetching it anew")
            target.unlink()
        if progress is None:
            progress = stack.enter_context(Progress(_short(url), echo))
        remote = stack.enter_context(contextlib.closing(_source(url, name, headers, auth)))
        partial = PartialFile(target, hashed=wanted is not None)
        stack.callback(partial.close)
        Transfer(
            remote,
            partial,
            progress,
            retry,
            echo,
            stop,
            connections,
            wanted is not None,
            expected_size,
        ).run()
        if wanted is not None:
            try:
                _require_checksum(name, partial.sha256(), wanted)
            except ModelUnavailable:
                partial.discard()
                raise
        partial.complete()
    return target


def size(url: str) -> int | None:
    """Size of the file at `url` in bytes; None if unknown or not reachable now. One request."""
    try:
        local = local_path(url)
        if local is not None:
            return local.stat().st_size
        remote = _source(url, redacted_name(url))
        with contextlib.closing(remote), remote.get(0, 1) as answer:
            return answer.identity.size if answer.identity is not None else None
    except Exception:  # noqa: BLE001  a download reports it
        return None


def head(url: str, most: int) -> tuple[bytes, int | None]:
    """The first bytes of the file at `url`, at most `most`, and its size if that is told.

    Raises:
        ModelUnavailable: it cannot be had.
    """
    name, data = redacted_name(url), b""
    remote = _source(url, name)
    try:
        with contextlib.closing(remote), remote.get(0, most) as answer:
            for chunk in answer.chunks:
                data += chunk
                if len(data) >= most:
                    break
            return data[:most], answer.identity.size if answer.identity is not None else None
    except TransientError as error:
        raise ModelUnavailable(f"{name}: {error}") from None


def local_path(url: str) -> Path | None:
    """Path that a path or file:// URL names, None for a URL of http(s) or an object store.

    Raises:
        ModelUnavailable: none of these.
    """
    if "://" not in url:
        return expanded(url)
    redacted_name(url)  # or it is refused
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    if parts.scheme in ("http", "https") or object_store.is_object(url):
        return None
    raise ModelUnavailable(
        f"{redact_address(url)}: must be a path, or a file:///path, http(s)://, s3://, gs://"
        " or az:// URL"
    )


def _source(
    url: str,
    name: str,
    headers: Mapping[str, str] | None = None,
    auth: httpx.Auth | None = None,
) -> Source:
    if object_store.is_object(url):
        return object_store.ObjectSource(url, name)
    return HTTPSource(url, name, headers, auth)


def redacted_name(url: str) -> str:
    """`url` or path, redacted, as errors and progress call it.

    Raises:
        ModelUnavailable: not a URL; without its text, which may hold a password.
    """
    if "://" not in url:
        return url
    try:
        _ = urlsplit(url).port  # a password with a bare # or / in it ends up there
        return redact_url(url)
    except ValueError:
        raise ModelUnavailable("not a valid URL") from None


def _short(url: str) -> str:
    parts = urlsplit(url)
    return parts.path.rpartition("/")[2] or parts.hostname or "file"


def _require_checksum(name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ModelUnavailable(f"{name}: has sha256 {found}, not {wanted}")
