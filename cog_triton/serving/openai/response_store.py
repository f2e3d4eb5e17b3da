"""Store of /v1/responses: whole responses, their input, and the events of their streams.

One thread of the Cog worker writes, in batches, so that no event loop waits for a disk; it ends
what nobody waits for, within bounds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import methodcaller
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

from cog_triton import errors
from cog_triton.errors import CogTritonError
from cog_triton.serving.openai.response_book import (
    END,
    GONE,
    RUNNING,
    Changes,
    Entry,
    Events,
    Kept,
    Object,
    ResponseBook,
    failure,
)
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.settings import Settings

_log = logging.getLogger(__name__)

FOLDER = "responses"
_BATCH_S = 0.05
_SWEEP_S = 1.0
_GRACE_S = 60.0
Apply = Callable[[Changes], None]


@dataclass(eq=False, slots=True)
class Recording:
    """A response that is made: what is to be written of it, and how it is ended."""

    id: str
    tenant: str
    previous: str | None
    input: str
    streamed: bool
    stop: Callable[[], None] = lambda: None
    begun: bool = False
    cancelled: bool = False
    broken: bool = False
    """Whether some of it could not be written, and it is kept no more."""
    readers: int = 0
    alone_s: float = 0.0
    """Seconds for which it continues without a reader."""
    pending: deque[bytes] = field(default_factory=deque)
    queued: bool = False
    written: int = 0
    """Events that are in the book."""


class _Change(NamedTuple):
    """A change of the book: whom it wakes, whether it waits for others, and who waits for it."""

    id: str
    apply: Apply
    urgent: bool = True
    done: Future[None] | None = None
    recording: Recording | None = None


class ResponseStore:
    """Responses of this worker and those before it.

    What awaits, and what begins or ends a response, is of one event loop; all else is thread-safe.
    """

    def __init__(
        self, book: ResponseBook, detached: int, detached_s: float, grace_s: float = _GRACE_S
    ) -> None:
        """`detached` responses that nobody waits for are made at once, each for `detached_s`.

        Streams that are not in the background continue for `grace_s` only, until a client returns.
        """
        self.live: dict[str, Recording] = {}
        """Those that this worker makes, by their ids."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Of those that were begun in the background."""
        self._detached: dict[str, asyncio.TimerHandle] = {}
        self._most_detached, self._detached_s = detached, detached_s
        self._grace_s = min(grace_s, detached_s)
        self._book = book
        self._changes: SimpleQueue[_Change | None] = SimpleQueue()
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._swept = 0.0
        self._thread = threading.Thread(target=self._write, name="responses", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """The store by the settings; None where they have none, or the file cannot be opened.

        Raises E1005 where `RESPONSE_STORE_URL` is none that answers.
        """
        if not settings.response_store_bytes:
            return None
        bounds = settings.response_store_bytes, settings.response_store_age
        directory = settings.work_dir / FOLDER
        book: ResponseBook
        if settings.response_store_url is not None:
            from cog_triton.serving.openai.response_server import ResponseServer

            book = ResponseServer(settings.response_store_url.get_secret_value(), *bounds)
        else:
            try:
                book = ResponseFile(directory, *bounds)
            except (OSError, sqlite3.Error) as error:
                _log.error("responses are not kept in %s: %s", directory, error)
                return None
        return cls(book, settings.detached_responses, settings.detached_timeout)

    def close(self) -> None:
        """Write what is left, and close the book."""
        self._changes.put(None)
        self._thread.join()
        self._book.close()

    def read(self, name: str, tenant: str) -> Kept:
        """A response of a tenant; raises E1009. Blocks."""
        self._fail_if_lost(name)
        kept = self._book.read(name, tenant)
        if kept is None:
            raise errors.NotFound(f"response={name[:80]!r}: {GONE}")
        return kept

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Count a reader of a response, for whom it is made on."""
        recording = self.live.get(name)
        if recording is not None:
            recording.readers += 1
        try:
            yield
        finally:
            if recording is not None:
                recording.readers -= 1
                if (timer := self._detached.get(name)) is not None:
                    timer.cancel()
                    self._wait_for_readers(recording)

    def events(self, name: str, first: int) -> Events:
        """Events from number `first` on; none once the response is gone. Blocks."""
        self._fail_if_lost(name)
        return self._book.events(name, first)

    def conversation(self, name: str, tenant: str, most: int) -> list[Any]:
        """Items of a response's conversation, with those before it and its own output.

        Raises E1005 if one is not kept, or has not ended, E1008 beyond `most` bytes. Blocks.
        """
        field = f"previous_response_id={name[:80]!r}"
        turns: list[list[Any]] = []
        previous: str | None = name
        while previous is not None:
            try:
                kept = self.read(previous, tenant)
            except errors.NotFound as error:
                raise errors.InvalidArgument(f"{field}: {error.detail}") from error
            if kept.status not in ("completed", "incomplete"):
                rule = f"{previous[:80]!r} is {kept.status}: must be completed"
                raise errors.InvalidArgument(f"{field}: {rule}")
            most -= len(kept.input) + len(kept.body)
            if most < 0:
                rule = "its conversation is longer than a request may be (MAX_REQUEST_BYTES)"
                raise errors.RequestTooLarge(f"{field}: {rule}")
            turns.append([*json.loads(kept.input), *kept.told()["output"]])
            previous = kept.previous
        return [item for turn in reversed(turns) for item in turn]

    async def begin(self, recording: Recording, body: Object) -> None:
        """Keep a response that is made from now on; raises E2100 or E2302 if it cannot be kept."""
        await self._insert(recording, body)
        recording.begun = True
        self.live[recording.id] = recording

    async def keep(self, recording: Recording, body: Object) -> None:
        """Keep a response that is made; raises E2100 or E2302 if it cannot be kept."""
        await self._insert(recording, body)

    def append(self, recording: Recording, data: bytes) -> None:
        """Keep more events of a response that has begun."""
        recording.pending.append(data)
        if not recording.queued:
            recording.queued = True
            apply = self._appending(recording)
            self._changes.put(_Change(recording.id, apply, urgent=False, recording=recording))

    def finish(self, recording: Recording, body: Object) -> Future[None]:
        """Store how a response that began ended; the future is as that of `change`."""
        self.live.pop(recording.id, None)
        if (timer := self._detached.pop(recording.id, None)) is not None:
            timer.cancel()
        append = self._appending(recording)

        def apply(changes: Changes) -> None:
            append(changes)
            if recording.broken:  # what could not be written then may be now
                changes.delete(recording.id)
            else:
                changes.end(recording.id, body)

        done: Future[None] = Future()
        self._changes.put(_Change(recording.id, apply, done=done, recording=recording))
        return done

    def require_room(self) -> None:
        """Raise E2107 unless one more may be made that nobody waits for."""
        if len(self._detached) >= self._most_detached:
            raise errors.Overloaded(
                f"{self._most_detached} responses are made in the background, as many as may be"
                " (DETACHED_RESPONSES); try again later"
            )

    def detach(self, recording: Recording, *, background: bool) -> bool:
        """Whether a response is made on although nobody waits for it."""
        if recording.id not in self.live or len(self._detached) >= self._most_detached:
            return False
        recording.alone_s = self._detached_s if background else self._grace_s
        self._wait_for_readers(recording)
        return True

    def _wait_for_readers(self, recording: Recording) -> None:
        """Cancel it after its time without a reader."""

        def expire() -> None:
            if recording.readers:
                self._wait_for_readers(recording)
            else:
                _log.warning("response %s: cancelled: nobody waits for it", recording.id)
                self.cancel(recording)

        loop = asyncio.get_running_loop()
        self._detached[recording.id] = loop.call_later(recording.alone_s, expire)

    def cancel(self, recording: Recording) -> None:
        """End a response that this worker makes."""
        recording.cancelled = True
        recording.stop()

    def change(self, name: str, apply: Apply) -> Future[None]:
        """Have the writer change the file; the future fails with E2100 or E2302."""
        done: Future[None] = Future()
        self._changes.put(_Change(name, apply, done=done))
        return done

    async def changed(self, name: str, timeout: float) -> None:
        """Wait until something of a response is written, or for so many seconds."""
        self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        waiters = self._waiters.setdefault(name, [])
        waiters.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout)
        finally:
            waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(name, None)

    async def _insert(self, recording: Recording, body: Object) -> None:
        self._loop = asyncio.get_running_loop()
        entry = Entry(
            name=recording.id,
            tenant=recording.tenant,
            status=body["status"],
            created=time.time(),
            streamed=recording.streamed,
            previous=recording.previous,
            input=recording.input,
            body=json.dumps(body),
        )

        def apply(changes: Changes) -> None:
            if (now := time.monotonic()) - self._swept > _SWEEP_S:
                self._swept = now
                changes.sweep()
            changes.insert(entry)

        await asyncio.wrap_future(self.change(recording.id, apply))

    def _appending(self, recording: Recording) -> Apply:
        def apply(changes: Changes) -> None:
            recording.queued = False  # before it is emptied: what comes later is a change anew
            parts = []
            while recording.pending:
                parts.append(recording.pending.popleft())
            if not (data := b"".join(parts)) or recording.broken:
                return

            def lost() -> None:  # another worker has cancelled or deleted it
                self._on_loop(lambda: self.cancel(recording))

            changes.append(recording.id, recording.written, count := data.count(END), data, lost)
            recording.written += count

        return apply

    def _write(self) -> None:
        """Apply changes until `close`, those of 50 ms at once."""
        while (first := self._changes.get()) is not None:
            changes = [first]
            deadline = time.monotonic() + _BATCH_S
            while True:
                left = 0.0 if changes[-1].urgent else deadline - time.monotonic()
                try:
                    change = self._changes.get(left > 0, left if left > 0 else None)
                except Empty:
                    break
                if change is None:
                    self._changes.put(None)
                    break
                changes.append(change)
            self._apply(changes)

    def _apply(self, changes: list[_Change]) -> None:
        failed: CogTritonError | None = None
        try:
            with self._book.writing() as batch:
                for change in changes:
                    change.apply(batch)
        except CogTritonError as error:
            failed = error
            _log.error("%s", error)
            self._give_up([each.recording for each in changes if each.recording is not None])
        for change in changes:
            if change.done is None or not change.done.set_running_or_notify_cancel():
                continue
            if failed is not None:
                change.done.set_exception(failed)
            else:
                change.done.set_result(None)
        ids = {change.id for change in changes}
        self._on_loop(lambda: self._wake(ids))

    def _give_up(self, recordings: Iterable[Recording]) -> None:
        """Keep nothing of what was not written whole."""
        for recording in recordings:
            if not recording.broken:
                recording.broken = True
                self._changes.put(_Change(recording.id, methodcaller("delete", recording.id)))

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(call)

    def _wake(self, ids: set[str]) -> None:
        for name in ids & self._waiters.keys():
            for waiter in self._waiters[name]:
                if not waiter.done():
                    waiter.set_result(None)

    def _fail_if_lost(self, name: str) -> None:
        """Fail a response whose worker lives no more."""
        found = self._book.owner_of(name)
        if found is None or found[0] != RUNNING or found[1] == self._book.owner:
            return
        if not self._book.lives(found[1]):
            self.change(name, lambda changes: changes.end(name, failure())).result()
