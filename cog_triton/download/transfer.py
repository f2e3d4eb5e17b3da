"""Transfer of a URL into a partial file: in parallel pieces, or in one stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from cog_triton.download import disk_space
from cog_triton.download.http_source import Answer, FileIdentity, Source
from cog_triton.download.partial_file import PartialFile
from cog_triton.download.retry import Backoff, RetryPolicy, TransientError
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.errors import ModelUnavailable

_POLL_S = 0.1
_JOIN_S = 1.0
Item = TypeVar("Item")
Check = Callable[[], None]
CONNECTIONS = 6


def in_parallel(
    items: Iterable[Item],
    work: Callable[[Item], None],
    most: int,
    halt: threading.Event,
    check: Check,
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
class Transfer:
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
                if self._attempt(in_pieces, backoff.require_running):
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

    def _attempt(self, in_pieces: bool, check: Check) -> bool:
        """Transfer once; False if the server cannot serve the file in pieces."""
        with self.remote.get(0, 1 if in_pieces else None) as answer:
            self._require_size(answer.identity)
            if answer.whole:
                self._one_stream(answer, check)
                return True
            if not in_pieces:
                raise TransientError(
                    "answers with a part of the file where all of it was asked for"
                )
            identity = answer.identity
        if identity is None or not (identity.etag or identity.modified or self.checked):
            return False
        self._in_pieces(identity, check)
        return True

    def _one_stream(self, answer: Answer, check: Check) -> None:
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
                check()
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

    def _in_pieces(self, identity: FileIdentity, check: Check) -> None:
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
            check,
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

    def _require_size(self, identity: FileIdentity | None) -> None:
        if identity is not None and self.expected_size not in (None, identity.size):
            raise self._other_size(str(identity.size))

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
