"""The bytes of a URL into a partial file: in pieces side by side, or in one stream."""

from __future__ import annotations

import queue
import threading

from cog_triton.download import disk_space
from cog_triton.download.partial_file import Partial
from cog_triton.download.remote import Answer, Identity, Remote
from cog_triton.download.retry import Passing, Patience, Retry
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.errors import BuildCancelled

CONNECTIONS = 6
_POLL_S = 0.1
_LEAVE_S = 1.0


class _Changed(Exception):
    """The URL's file is no more the one that pieces are here of."""


class Transfer:
    """One file, from `remote` to `partial`.

    Args:
        checked: the whole file's sum will be checked, so that pieces may be put together although
            the server gives no validator by which a changed file would be seen.
    """

    def __init__(
        self,
        remote: Remote,
        partial: Partial,
        progress: Progress,
        retry: Retry,
        echo: Echo,
        stop: threading.Event,
        connections: int,
        checked: bool,
    ) -> None:
        self._remote = remote
        self._partial = partial
        self._progress = progress
        self._retry = retry
        self._echo = echo
        self._stop = stop
        self._connections = connections
        self._checked = checked
        self._halt = threading.Event()
        self._lock = threading.Lock()
        self._reached = 0
        self._counted = 0

    def run(self) -> None:
        """Do it, however often it takes.

        Raises:
            ModelUnavailable, DiskFull: it cannot be done. Finished pieces stay.
            BuildCancelled: it was stopped. Finished pieces stay.
        """
        patience = self._patience(self._stop)
        changes, in_pieces = 0, True
        while True:
            try:
                if self._attempt(in_pieces):
                    return
                in_pieces = False
            except Passing as trouble:
                patience.failed(trouble)
            except _Changed:
                changes += 1
                in_pieces = changes < 2  # mirrors that differ: take one answer of one of them
                self._echo(f"[download] {self._remote.name}: has changed; starting over")
                self._partial.discard()
            self._progress.skip(-self._counted)
            self._counted = 0

    def _attempt(self, in_pieces: bool) -> bool:
        """Whether it is done; if not, it cannot be done in pieces."""
        with self._remote.ask(0, 1 if in_pieces else None) as answer:
            if answer.whole:
                self._one_stream(answer)
                return True
            if not in_pieces:
                raise Passing("answers with a part of the file where all of it was asked for")
            identity = answer.identity
        if identity is None or not (identity.etag or identity.modified or self._checked):
            return False
        self._in_pieces(identity)
        return True

    def _one_stream(self, answer: Answer) -> None:
        size = None if answer.identity is None else answer.identity.size
        if self._partial.known() is not None:
            self._echo(f"[download] {self._remote.name}: comes in one stream; starting over")
        self._partial.restart()
        at = 0
        try:
            if size is not None:
                disk_space.check(self._partial.path.parent, size, self._remote.name)
                self._progress.expect(size)
            for chunk in answer.chunks:
                self._not_stopped()
                self._partial.write(at, chunk)
                at += len(chunk)
                self._count(len(chunk), at)
            if size is not None and at != size:
                raise Passing(f"got {at} of {size} bytes")
        except BaseException:
            self._partial.discard()  # nobody could go on from here
            raise

    def _in_pieces(self, identity: Identity) -> None:
        known = self._partial.known()
        if known is not None and known != identity:
            self._echo(f"[download] {self._remote.name}: has changed; starting over")
        done = self._partial.resume(identity)
        pieces = self._partial.pieces()
        here = sum(stop - start for number, (start, stop) in pieces.items() if number in done)
        disk_space.check(self._partial.path.parent, identity.size - here, self._remote.name)
        self._progress.expect(identity.size)
        self._progress.skip(here)
        self._counted = here
        if here:
            self._echo(f"[download] {self._remote.name}: going on after {len(done)} pieces")
        todo: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        for number, (start, stop) in pieces.items():
            if number not in done:
                todo.put((number, start, stop))
        self._side_by_side(identity, todo)

    def _side_by_side(
        self, identity: Identity, todo: queue.SimpleQueue[tuple[int, int, int]]
    ) -> None:
        errors: list[BaseException] = []
        self._halt = halt = threading.Event()

        def work() -> None:
            try:
                while not halt.is_set():
                    self._piece(identity, *todo.get_nowait())
            except queue.Empty:
                pass
            except BaseException as error:  # noqa: BLE001  raised again below
                errors.append(error)
                halt.set()

        # Daemons: an interrupted process does not wait for a server that says nothing.
        count = min(self._connections, todo.qsize())
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_S)
                    self._not_stopped()
                    if errors:
                        break
        finally:
            halt.set()
            for thread in threads:
                if thread.is_alive():
                    thread.join(_LEAVE_S)
        if errors:
            raise errors[0]

    def _piece(self, identity: Identity, number: int, at: int, stop: int) -> None:
        patience = self._patience(self._halt)
        while at < stop:
            before = at
            try:
                with self._remote.ask(at, stop) as answer:
                    _belongs(answer, identity, at)
                    for chunk in answer.chunks:
                        if self._halt.is_set():
                            return
                        wanted = chunk[: stop - at]
                        self._partial.write(at, wanted)
                        at += len(wanted)
                        self._count(len(wanted))
                        if len(wanted) < len(chunk):
                            break
                if at == before:
                    raise Passing("answered without a byte")
            except Passing as trouble:
                patience.failed(trouble)
        self._partial.finish(number)

    def _count(self, count: int, at: int | None = None) -> None:
        """`count` bytes have come; of a stream, which may start over, up to `at`."""
        with self._lock:
            self._reached = self._reached + count if at is None else max(self._reached, at)
            self._counted += count
        self._progress.advance(count)

    def _patience(self, stop: threading.Event) -> Patience:
        def wait(seconds: float) -> None:
            if stop.wait(seconds):
                raise BuildCancelled(f"{self._remote.name}: the download was stopped")

        return Patience(self._retry, self._remote.name, self._echo, lambda: self._reached, wait)

    def _not_stopped(self) -> None:
        if self._stop.is_set():
            raise BuildCancelled(f"{self._remote.name}: the download was stopped")


def _belongs(answer: Answer, identity: Identity, at: int) -> None:
    """Raise unless these are bytes of `identity`, from `at` on."""
    if answer.identity != identity:
        raise _Changed
    if answer.whole:
        raise Passing("does not answer with the part that was asked for")
    if answer.start != at:
        raise Passing(f"answers from byte {answer.start} where {at} was asked for")
