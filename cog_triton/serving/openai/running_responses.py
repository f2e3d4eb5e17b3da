"""Responses that this server makes: their events in memory, their readers, and their end.

All of it is of one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from cog_triton import errors
from cog_triton.errors import CogTritonError
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.response_store import GONE, RUNNING, ResponseStore, StoredResponse
from cog_triton.settings import Settings

_log = logging.getLogger(__name__)

Object = dict[str, Any]
FOLDER = "responses"
END = b"\n\n"
"""End of an event."""
_GRACE_S = 60.0
_DETACHED_S = 3600.0
_RETRIES, _RETRY_S = 12, 5.0
_EVENT_BYTES = 64 << 20


@dataclass(eq=False, slots=True)
class RunningResponse:
    """A response that is made; `stop` ends its sequences.

    It continues for `alone_s` without a reader.
    """

    id: str
    tenant: str
    previous: str | None
    input: str
    stop: Callable[[], None] = lambda: None
    cancelled: bool = False
    ended: bool = False
    alone_s: float = 0.0
    readers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[bytes] = field(default_factory=list)
    """By their numbers, each without its `END`."""
    size: int = 0
    lost: bool = False
    """Whether its events are no longer in memory."""

    def stored(self, body: Object) -> StoredResponse:
        """It with this object, as it is stored."""
        start = self.id, self.tenant, body["status"], time.time(), self.previous
        return StoredResponse(*start, self.input, json.dumps(body))

    def cancel(self) -> None:
        """End it."""
        self.cancelled = True
        self.stop()


class RunningResponses:
    """Responses of this server; up to `detached` are made without a reader, for `detached_s` each.

    Streams that are not in the background continue for `grace_s` without one.
    """

    def __init__(
        self,
        store: ResponseStore,
        detached: int,
        detached_s: float = _DETACHED_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.store = store
        self.live: dict[str, RunningResponse] = {}
        """Those whose end is not stored yet, by their ids."""
        self.replayed: dict[str, RunningResponse] = {}
        """Those whose events are in memory: until a minute after the end."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop, self._size = asyncio.get_running_loop(), 0
        self._detached: dict[str, asyncio.TimerHandle] = {}
        self._most_detached, self._detached_s = detached, detached_s
        self._grace_s = min(grace_s, detached_s)

    @classmethod
    async def of(cls, settings: Settings) -> Self | None:
        """Those by the settings; None if nothing is to be stored, or the file fails to open.

        Raises E1005 if `RESPONSE_STORE_URL` does not answer.
        """
        if not settings.response_store_bytes:
            return None
        bounds = settings.response_store_bytes, settings.response_store_age
        most = settings.detached_responses
        if settings.response_store_url is not None:
            from cog_triton.serving.openai.response_redis import ResponseRedis

            shared = ResponseRedis(settings.response_store_url.get_secret_value(), *bounds)
            found = cls(shared, most)
            await shared.live(found.cancel)
            return found
        directory = settings.work_dir / FOLDER
        try:
            return cls(ResponseFile(directory, *bounds), most)
        except (OSError, sqlite3.Error) as error:
            _log.error("responses are not kept in %s: %s", directory, error)
            return None

    async def read(self, name: str, tenant: str) -> StoredResponse:
        """A response of a tenant, failed if no server makes it any longer; raises E1009."""
        live = name in self.live  # before it is read, since it may end meanwhile
        found = await self.store.read(name, tenant) if name.isascii() else None
        if found is None:
            raise errors.NotFound(f"response={name[:80]!r}: {GONE}")
        if live or found.elsewhere or found.status != RUNNING:
            return found
        lost = "the server ended while it made this response, or could not store its end"
        changes = {"status": "failed", "error": error_of(errors.TritonUnavailable(lost))}
        return found._replace(status="failed", body=json.dumps(json.loads(found.body) | changes))

    def conversation(self, name: str, tenant: str, most: int) -> list[Any]:
        """Items of a response's conversation, with those before it and its own output.

        Raises E1005 if one is not stored, or has not ended, E1008 beyond `most` bytes. Blocks a
        thread that is not the loop's.
        """
        field = f"previous_response_id={name[:80]!r}"
        turns: list[list[Any]] = []
        previous: str | None = name
        while previous is not None:
            reading = asyncio.run_coroutine_threadsafe(self.read(previous, tenant), self._loop)
            try:
                found = reading.result()
            except errors.NotFound as error:
                raise errors.InvalidArgument(f"{field}: {error.detail}") from error
            if found.status not in ("completed", "incomplete"):
                rule = f"{previous[:80]!r} is {found.status}: must be completed"
                raise errors.InvalidArgument(f"{field}: {rule}")
            most -= len(found.input) + len(found.body)
            if most < 0:
                rule = "its conversation is longer than a request may be (MAX_REQUEST_BYTES)"
                raise errors.RequestTooLarge(f"{field}: {rule}")
            turns.append([*json.loads(found.input), *json.loads(found.body)["output"]])
            previous = found.previous
        return [item for turn in reversed(turns) for item in turn]

    async def begin(self, running: RunningResponse, body: Object) -> None:
        """Store a response that is made from now on; raises E2100 or E2302."""
        await self.store.add(running.stored(body))
        self.live[running.id] = self.replayed[running.id] = running

    def append(self, running: RunningResponse, data: bytes) -> None:
        """Add events to one; beyond the memory of all, the oldest response loses its own."""
        if not running.lost:
            running.events += data.split(END)[:-1]
            running.size += len(data)
            self._size += len(data)
        running.changed.set()
        while self._size > _EVENT_BYTES:
            self._forget(next(iter(self.replayed.values())))

    async def end(self, running: RunningResponse, body: Object, last: bytes = b"") -> None:
        """Store how one ended, then add its last events, even if it cannot be stored."""
        if (timer := self._detached.pop(running.id, None)) is not None:
            timer.cancel()
        ended = running.id, body["status"], json.dumps(body)
        try:
            await self.store.end(*ended)
            self.live.pop(running.id, None)
        except CogTritonError as error:
            _log.error("%s", error)
            self.start(self._end_later(*ended))
        running.ended = True
        self.append(running, last)
        self._loop.call_later(_GRACE_S, self._forget, running)

    async def _end_later(self, name: str, status: str, body: str) -> None:
        """Store an end again for a minute, as while Redis restarts; then it reads as failed."""
        for _ in range(_RETRIES):
            await asyncio.sleep(_RETRY_S)
            with suppress(CogTritonError):
                await self.store.end(name, status, body)
                break
        self.live.pop(name, None)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that no request waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def reading(self, running: RunningResponse) -> Iterator[None]:
        """Count a reader of a response, for whom it continues."""
        running.readers += 1
        try:
            yield
        finally:
            running.readers -= 1
            if running.id in self._detached:
                self._end_alone(running)

    def require_room(self) -> None:
        """Raise E2107 unless one more may be made without a reader."""
        if len(self._detached) >= self._most_detached:
            raise errors.Overloaded(
                f"{self._most_detached} responses are made in the background, as many as may be"
                " (DETACHED_RESPONSES); try again later"
            )

    def leave(self, running: RunningResponse, *, background: bool) -> None:
        """Continue without a reader, or cancel it if that is not allowed."""
        if running.id not in self.live or len(self._detached) >= self._most_detached:
            running.cancel()
            return
        running.alone_s = self._detached_s if background else self._grace_s
        self._end_alone(running)

    def cancel(self, name: str) -> None:
        """Cancel a response, if this server makes it."""
        if (running := self.live.get(name)) is not None:
            running.cancel()

    def _end_alone(self, running: RunningResponse) -> None:
        """Cancel it after its time without a reader."""

        def expire() -> None:
            if running.readers:
                self._end_alone(running)
            else:
                _log.warning("response %s: cancelled: nobody waits for it", running.id)
                running.cancel()

        if (timer := self._detached.get(running.id)) is not None:
            timer.cancel()
        self._detached[running.id] = self._loop.call_later(running.alone_s, expire)

    def _forget(self, running: RunningResponse) -> None:
        """Free the memory of its events."""
        if self.replayed.pop(running.id, None) is not None:
            self._size -= running.size
            running.events, running.lost = [], True
            running.changed.set()


def error_of(error: CogTritonError) -> Object:
    """The `error` of a failed response: OpenAI's code, and ours in the message."""
    return {"code": "server_error", "message": str(error)}
