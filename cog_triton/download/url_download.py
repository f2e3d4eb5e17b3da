"""Download of one URL to a file: parallel, resumable, checksummed and atomic."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from cog_triton.artifact.engine_manifest import sha256_of
from cog_triton.download import disk_space, object_store
from cog_triton.download.http_source import Answer, FileIdentity, HTTPSource, Source
from cog_triton.download.partial_file import PartialFile
from cog_triton.download.retry import Backoff, RetryPolicy, TransientError
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.errors import ModelUnavailable
from cog_triton.system.paths import expanded
from cog_triton.system.redaction import redact_address, redact_url

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_JOIN_S = 1.0
CONNECTIONS = 6
Item = TypeVar("Item")


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
        checked = wanted is not None
        options = (retry, echo, stop, connections, checked, expected_size)
        _Transfer(remote, partial, progress, *options).run()
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
        return head(url, 1)[1] if local is None else local.stat().st_size
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


def in_parallel(
    items: Iterable[Item],
    work: Callable[[Item], None],
    most: int,
    halt: threading.Event,
    check: Callable[[], None],
) -> None:
    """Call `work` for each of `items`, in order, in up to `most` threads.

    Args:
        halt: set when `work` is to return, after an error or at the end.
        check: called all the while in this thread; may raise to cancel.

    Raises:
        The first error of `work`, or what `check` raises.
    """
    todo: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not halt.is_set():
                work(todo.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)
            halt.set()

    # Daemons: an interrupted process does not wait for a silent server.
    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(most, todo.qsize()))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL_S)
                check()
                if errors:
                    break
    finally:
        halt.set()
        for thread in threads:
            if thread.is_alive():
                thread.join(_JOIN_S)
    if errors:
        raise errors[0]


class _FileChanged(Exception):
    """The server's file is no longer the one that the finished pieces are of."""


@dataclass
class _Transfer:
    """Transfer of one file from `remote` to `partial`, with retries.

    Attributes:
        checked: the whole file's checksum will be verified, so pieces may be put together although
            the server gives no validator that would show a change.
        expected_size: in bytes; of a file of another none is taken.
    """

    remote: Source
    partial: PartialFile
    progress: Progress
    policy: RetryPolicy
    echo: Echo
    stop: threading.Event
    connections: int
    checked: bool
    expected_size: int | None = None
    _halt: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _received: int = field(default=0, init=False)
    _counted: int = field(default=0, init=False)

    def run(self) -> None:
        """Transfer the file, with retries.

        Raises:
            ModelUnavailable, DiskFull: not possible; finished pieces stay.
            BuildCancelled: stopped; finished pieces stay.
        """
        backoff = self._new_backoff(self.stop)
        changes, in_pieces = 0, True
        while True:
            try:
                if self._attempt(in_pieces, backoff):
                    return
                in_pieces = False
            except TransientError as error:
                backoff.wait_after(error)
            except _FileChanged:
                changes += 1
                in_pieces = changes < 2  # mirrors that differ: take one answer of one of them
                self.echo(f"[download] {self.remote.name}: has changed; starting over")
                self.partial.discard()
            self.progress.skip(-self._counted)
            self._counted = 0

    def _attempt(self, in_pieces: bool, backoff: Backoff) -> bool:
        """Transfer once; False if the server cannot serve the file in pieces."""
        with self.remote.get(0, 1 if in_pieces else None) as answer:
            if answer.identity and self.expected_size not in (None, answer.identity.size):
                raise self._other_size(str(answer.identity.size))
            if answer.whole:
                self._one_stream(answer, backoff)
                return True
            if not in_pieces:
                raise TransientError(
                    "answers with a part of the file where all of it was asked for"
                )
            identity = answer.identity
        if identity is None or not (identity.etag or identity.modified or self.checked):
            return False
        self._in_pieces(identity, backoff)
        return True

    def _one_stream(self, answer: Answer, backoff: Backoff) -> None:
        size = None if answer.identity is None else answer.identity.size
        if self.partial.known() is not None:
            self.echo(f"[download] {self.remote.name}: comes in one stream; starting over")
        self.partial.restart()
        at = 0
        try:
            if size is not None:
                disk_space.require(self.partial.path.parent, size, self.remote.name)
                self.progress.expect(size)
            for chunk in answer.chunks:
                backoff.require_running()
                if self.expected_size is not None and at + len(chunk) > self.expected_size:
                    raise self._other_size(f"over {self.expected_size}")
                self.partial.write(at, chunk)
                at += len(chunk)
                self._count(len(chunk), at)
            wanted = self.expected_size if size is None else size
            if wanted is not None and at != wanted:
                raise TransientError(f"got {at} of {wanted} bytes")
        except BaseException:
            self.partial.discard()  # a stream cannot be resumed
            raise

    def _in_pieces(self, identity: FileIdentity, backoff: Backoff) -> None:
        known = self.partial.known()
        if known is not None and known != identity:
            self.echo(f"[download] {self.remote.name}: has changed; starting over")
        done = self.partial.resume(identity)
        pieces = self.partial.pieces()
        here = sum(stop - start for number, (start, stop) in pieces.items() if number in done)
        disk_space.require(self.partial.path.parent, identity.size - here, self.remote.name)
        self.progress.expect(identity.size)
        self.progress.skip(here)
        self._counted = here
        if here:
            self.echo(f"[download] {self.remote.name}: going on after {len(done)} pieces")
        todo = [(number, *span) for number, span in pieces.items() if number not in done]
        self._halt = threading.Event()
        in_parallel(
            todo,
            lambda piece: self._piece(identity, *piece),
            self.connections,
            self._halt,
            backoff.require_running,
        )

    def _piece(self, identity: FileIdentity, number: int, at: int, stop: int) -> None:
        backoff = self._new_backoff(self._halt)
        while at < stop:
            before = at
            try:
                with self.remote.get(at, stop) as answer:
                    _require_range(answer, identity, at)
                    for chunk in answer.chunks:
                        if self._halt.is_set():
                            return
                        wanted = chunk[: stop - at]
                        self.partial.write(at, wanted)
                        at += len(wanted)
                        self._count(len(wanted))
                        if len(wanted) < len(chunk):
                            break
                if at == before:
                    raise TransientError("answered without a byte")
            except TransientError as error:
                backoff.wait_after(error)
        self.partial.finish(number)

    def _count(self, count: int, at: int | None = None) -> None:
        """Count `count` received bytes; of a stream, which may start over, those up to `at`."""
        with self._lock:
            self._received = self._received + count if at is None else max(self._received, at)
            self._counted += count
        self.progress.advance(count)

    def _new_backoff(self, stop: threading.Event) -> Backoff:
        return Backoff(self.policy, self.remote.name, self.echo, lambda: self._received, stop)

    def _other_size(self, found: str) -> ModelUnavailable:
        name, wanted = self.remote.name, self.expected_size
        return ModelUnavailable(f"{name}: has {found} bytes, not {wanted} as its digest is of")


def _require_range(answer: Answer, identity: FileIdentity, at: int) -> None:
    """Raise unless `answer` has bytes of `identity`, from `at` on."""
    if answer.identity != identity:
        raise _FileChanged
    if answer.whole:
        raise TransientError("does not answer with the part that was asked for")
    if answer.start != at:
        raise TransientError(f"answers from byte {answer.start} where {at} was asked for")
