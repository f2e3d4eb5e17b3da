"""Responses that are stored: recorded while they are made, read, cancelled and deleted.

A stream is recorded as its client gets it, and continues for a minute when that leaves; a client
that returns (`starting_after`) reads the events from the memory of the server that makes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self, cast

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cog_triton import errors
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnavailable
from cog_triton.serving.openai.error_responses import (
    error_body,
    error_response,
    json_response,
    to_coded_error,
)
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.response_store import GONE, RUNNING, ResponseStore, StoredResponse
from cog_triton.serving.openai.shapes import ResponseShape, named_event
from cog_triton.serving.openai.streaming import BODY_SEND, STREAM_HEADERS, GenerationResponse
from cog_triton.serving.tenants import CURRENT
from cog_triton.settings import Settings
from cog_triton.system.printable import shortened

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


class _ResponseId(StringConvertor):
    """An id in a path, unlike the names of endpoints below /v1/responses."""

    regex = "resp[^/]*"


register_url_convertor("response", _ResponseId())
_COMMENT = b": nothing new yet\n\n"
_COMMENT_S, _POLL_S, _CANCEL_S = 5.0, 0.05, 10.0
_MOST_EVENTS = 64
_NO_EVENTS = "there are no events of this response, or no longer; read it without stream"
_ELSEWHERE = "another server makes this response, and it cannot be asked to end it"


def tenant_name() -> str:
    """The tenant whose request this is; empty where no key tells one."""
    tenant = CURRENT.get()
    return "" if tenant is None else tenant.name


@dataclass(slots=True)
class RecordedResponse(GenerationResponse):
    """Response that `store` asks for; with `background` nobody waits, unless it is streamed."""

    responses: RunningResponses
    running: RunningResponse
    background: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running.stop = self.sequences.cancel
        if not self.background or self.streamed:
            await GenerationResponse.__call__(self, scope, receive, send)
            return
        try:
            self.responses.require_room()
            response = await self._begun(scope, receive)
        except Exception as error:  # noqa: BLE001 - answered with its code
            response = error_response(to_coded_error(error), path=scope["path"])
        await response(scope, receive, send)

    def cancel(self) -> None:
        """The client has left."""
        if self.streamed:
            self.responses.leave(self.running, background=self.background)
        else:
            self.running.cancel()

    async def complete(self) -> Response:
        response = await GenerationResponse.complete(self)
        try:
            await self.responses.store.add(self.running.stored(self._shape.made))
        except CogTritonError as error:
            _log.error("%s", error)
            return json_response({**self._shape.made, "store": False})
        return response

    @property
    def _shape(self) -> ResponseShape:
        return cast(ResponseShape, self.shape)

    async def _begun(self, scope: Scope, receive: Receive) -> Response:
        """Begin it on a task of its own; what its client gets, be it an error that came at once."""
        begun: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        body = b""

        async def sink(message: Message) -> None:
            nonlocal body
            if not begun.done() and message["type"] == "http.response.start":
                begun.set_result(message)
            elif begun.result()["status"] != 200:
                body += message.get("body", b"")

        task = self.responses.start(self._send_stream({**scope, BODY_SEND: sink}, receive, sink))
        start = await begun
        if start["status"] != 200:
            await task
            headers = {key.decode(): value.decode() for key, value in start["headers"]}
            return Response(body, start["status"], headers)
        return json_response(self._begun_object())

    def _begun_object(self) -> Object:
        return {**self._shape.made, "status": RUNNING, "output": [], "usage": None}

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        running, responses = self.running, self.responses
        send_body = scope.get(BODY_SEND, send)

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                await self._begin()
            await send(message)

        async def send_recorded(message: Message) -> None:
            data = message["body"]
            live = running.id in responses.live
            if live and not message.get("more_body"):
                await responses.end(running, self._ended(), data)
            elif live and not data.startswith(b":"):  # a comment is alone
                responses.append(running, data)
            await send_body(message)

        try:
            scope = {**scope, BODY_SEND: send_recorded}
            await GenerationResponse._send_stream(self, scope, receive, send_start)
        finally:
            if running.id in responses.live and not running.ended:  # the server stops
                await responses.end(running, self._ended())

    async def _begin(self) -> None:
        """Store it from now on; raises E2100 or E2302 if it must be, and cannot be stored."""
        self._shape.response(RUNNING, [], None)
        try:
            await self.responses.begin(self.running, self._begun_object())
        except CogTritonError as error:
            if self.background:
                raise
            _log.error("%s", error)
            self._shape.echoed["store"] = False
        if self.background and not self.streamed:
            self.responses.leave(self.running, background=True)

    def _ended(self) -> Object:
        """The object of the end, whatever that was."""
        shape = self._shape
        if shape.error is None and shape.made["status"] != RUNNING:
            return shape.made
        output = shape.unfinished()
        if self.running.cancelled:
            return shape.response("cancelled", output, None)
        error = shape.error or TritonUnavailable("the server stopped")
        failed = shape.response("failed", output, None)
        return {**failed, "error": error_of(error)}


class StoredResponses:
    """The endpoints of stored responses, each for the tenant that has asked for it."""

    def __init__(self, responses: RunningResponses) -> None:
        self._responses = responses

    def routes(self) -> list[Route]:
        one = "/v1/responses/{id:response}"
        return [
            Route(one, self._one, methods=["GET", "DELETE"]),
            Route(f"{one}/cancel", self._cancel, methods=["POST"]),
            Route(f"{one}/input_items", self._input_items, methods=["GET"]),
        ]

    async def _one(self, request: Request) -> Response:
        return await (self._delete if request.method == "DELETE" else self._get)(request)

    async def _input_items(self, request: Request) -> Response:
        found = await self._found(request)
        asked = request.query_params
        if (order := asked.get("order", "desc")) not in ("asc", "desc"):
            raise InvalidArgument(f"order={shortened(order)}: must be asc or desc")
        limit = asked.get("limit", "20")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 0 < int(limit) <= 100):
            raise InvalidArgument(f"limit={shortened(limit)}: must be from 1 to 100")
        given = await asyncio.to_thread(json.loads, found.input)
        items = [_input_item(f"{found.id}-{place}", item) for place, item in enumerate(given)]
        items = items[::-1] if order == "desc" else items
        if (after := asked.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidArgument(f"after={shortened(after)}: must be the id of an input item")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        ends = {"first_id": first, "last_id": last, "has_more": len(items) > len(page)}
        return json_response({"object": "list", "data": page, **ends})

    async def _get(self, request: Request) -> Response:
        found = await self._found(request)
        asked = request.query_params
        if (stream := asked.get("stream", "false")) not in ("true", "false"):
            raise InvalidArgument(f"stream={shortened(stream)}: must be true or false")
        after = asked.get("starting_after", "-1")
        if after != "-1" and not (after.isascii() and after.isdecimal() and len(after) < 16):
            raise InvalidArgument(f"starting_after={shortened(after)}: must be an event's number")
        if stream == "false":
            return _object(found)
        if found.elsewhere:
            return _conflict("stream=true: another server makes this response, and has its events")
        if (running := self._responses.replayed.get(found.id)) is None:
            raise InvalidArgument(f"stream=true: {_NO_EVENTS}")
        events = self._events(running, int(after) + 1)
        return StreamingResponse(events, headers=STREAM_HEADERS | {"x-request-id": found.id})

    async def _delete(self, request: Request) -> Response:
        found = await self._found(request)
        if found.elsewhere and not await self._responses.store.cancel(found):
            return _conflict(_ELSEWHERE)
        await self._responses.store.delete(found.id)
        self._responses.cancel(found.id)
        return json_response({"id": found.id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        found = await self._found(request)
        if found.elsewhere and not await self._responses.store.cancel(found):
            return _conflict(_ELSEWHERE)
        self._responses.cancel(found.id)
        deadline = time.monotonic() + _CANCEL_S
        while found.status == RUNNING and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            found = await self._found(request)
        return _object(found)

    async def _found(self, request: Request) -> StoredResponse:
        return await self._responses.read(request.path_params["id"], tenant_name())

    async def _events(self, running: RunningResponse, at: int) -> AsyncIterator[bytes]:
        """The events from number `at` on, until the last."""
        with self._responses.reading(running):
            while not running.lost:
                running.changed.clear()
                if events := running.events[at : at + _MOST_EVENTS]:
                    at += len(events)
                    yield END.join([*events, b""])
                elif running.ended:
                    return
                else:
                    try:
                        await asyncio.wait_for(running.changed.wait(), _COMMENT_S)
                    except TimeoutError:
                        yield _COMMENT
        body = error_body(InvalidArgument(f"stream=true: {_NO_EVENTS}"))
        yield named_event({**body["error"], **body, "type": "error", "sequence_number": at})


def _object(found: StoredResponse) -> Response:
    return Response(found.body, media_type="application/json")


def _conflict(why: str) -> Response:
    return error_response(InvalidArgument(why), 409)


def _input_item(name: str, item: Object) -> Object:
    """An item of the input as OpenAI lists it; clients may give two of them one id."""
    given = {key: value for key, value in item.items() if value is not None}
    found: Object = {"type": "message", "status": "completed", **given, "id": name}
    if isinstance(text := found.get("content"), str):
        kind = "output_text" if found.get("role") == "assistant" else "input_text"
        extra: Object = {"annotations": []} if kind == "output_text" else {}
        found["content"] = [{"type": kind, "text": text, **extra}]
    return found
