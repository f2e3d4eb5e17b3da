"""Responses that are kept: recorded while they are made, and told, cancelled and deleted later.

A stream is recorded as its client gets it, and continues for a minute when that leaves; a client
that returns (`starting_after`) reads the events from the store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnavailable
from cog_triton.serving.openai.application import BODY_SEND
from cog_triton.serving.openai.error_responses import error_response, json_response, to_coded_error
from cog_triton.serving.openai.event_shapes import ResponseShape, named_event
from cog_triton.serving.openai.response_book import END, RUNNING, Kept, Object, error_of
from cog_triton.serving.openai.response_store import Recording, ResponseStore
from cog_triton.serving.openai.streaming import STREAM_HEADERS, GenerationResponse
from cog_triton.serving.tenants import CURRENT
from cog_triton.system.printable import shortened

_LAST = tuple(
    f"event: {name}\n".encode()
    for name in ("error", "response.completed", "response.incomplete", "response.failed")
)


class _ResponseId(StringConvertor):
    """An id in a path, unlike the names of endpoints below /v1/responses."""

    regex = "resp[^/]*"


register_url_convertor("response", _ResponseId())
_COMMENT = b": nothing new yet\n\n"
_POLL_S, _COMMENT_S = 0.25, 5.0
_CANCEL_S = 10.0


def tenant_name() -> str:
    """The tenant whose request this is; empty where no key tells one."""
    tenant = CURRENT.get()
    return "" if tenant is None else tenant.name


@dataclass(slots=True)
class RecordedResponse(GenerationResponse):
    """Response that `store` keeps; with `background` nobody waits for it, unless it is streamed."""

    store: ResponseStore
    recording: Recording
    background: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.recording.stop = self.sequences.cancel
        if not self.background or self.streamed:
            await GenerationResponse.__call__(self, scope, receive, send)
            return
        try:
            self.store.require_room()
            response = await self._begun(scope, receive)
        except Exception as error:  # noqa: BLE001 - answered with its code
            response = error_response(to_coded_error(error), path=scope["path"])
        await response(scope, receive, send)

    def cancel(self) -> None:
        """The client has left."""
        if self.streamed:
            self._leave()
        else:
            self.store.cancel(self.recording)

    async def complete(self) -> Response:
        response = await GenerationResponse.complete(self)
        try:
            await self.store.keep(self.recording, self._shape.made)
        except CogTritonError:  # told by the store; who waits has the answer
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

        sending = self._send_stream({**scope, BODY_SEND: sink}, receive, sink)
        task = asyncio.create_task(sending)
        self.store.tasks.add(task)
        task.add_done_callback(self.store.tasks.discard)
        start = await begun
        if start["status"] != 200:
            await task
            headers = {key.decode(): value.decode() for key, value in start["headers"]}
            return Response(body, start["status"], headers)
        return json_response(self._begun_object())

    def _begun_object(self) -> Object:
        return {**self._shape.made, "status": RUNNING, "output": [], "usage": None}

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        recording, store = self.recording, self.store
        send_body = scope.get(BODY_SEND, send)

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                await self._begin()
            await send(message)

        async def send_recorded(message: Message) -> None:
            data = message["body"]
            if recording.begun and data and not data.startswith(b":"):  # a comment is alone
                store.append(recording, data)
            if recording.begun and not message.get("more_body"):  # its client may continue it
                with suppress(CogTritonError):  # the store logs it
                    await asyncio.wrap_future(store.finish(recording, self._ended()))
            await send_body(message)

        try:
            scope = {**scope, BODY_SEND: send_recorded}
            await GenerationResponse._send_stream(self, scope, receive, send_start)
        finally:
            if recording.id in store.live:
                store.finish(recording, self._ended())

    def _leave(self) -> None:
        """Continue without a reader, or cancel it if that is not allowed."""
        if not self.store.detach(self.recording, background=self.background):
            self.store.cancel(self.recording)

    async def _begin(self) -> None:
        """Keep it from now on; raises E2100 or E2302 where it cannot be kept, and is to be."""
        self._shape.response(RUNNING, [], None)
        try:
            await self.store.begin(self.recording, self._begun_object())
        except CogTritonError:  # told by the store
            if self.background:
                raise
            self._shape.echoed["store"] = False
        if self.background and not self.streamed:
            self._leave()

    def _ended(self) -> Object:
        """The object of the end, whatever that was."""
        shape = self._shape
        if shape.error is None and shape.made["status"] != RUNNING:
            return shape.made
        output = shape.unfinished()
        if self.recording.cancelled:
            return shape.response("cancelled", output, None)
        error = shape.error or TritonUnavailable("the server stopped")
        failed = shape.response("failed", output, None)
        return {**failed, "error": error_of(error)}


class StoredResponses:
    """The endpoints of responses that are kept, each for the tenant that has asked for it."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

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
        name, kept = await self._kept(request)
        asked = request.query_params
        if (order := asked.get("order", "desc")) not in ("asc", "desc"):
            raise InvalidArgument(f"order={shortened(order)}: must be asc or desc")
        limit = asked.get("limit", "20")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 0 < int(limit) <= 100):
            raise InvalidArgument(f"limit={shortened(limit)}: must be from 1 to 100")
        given = enumerate(json.loads(kept.input))
        items = [_input_item(f"{name}-{place}", item) for place, item in given]
        items = items[::-1] if order == "desc" else items
        if (after := asked.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidArgument(f"after={shortened(after)}: must be the id of an input item")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        found = {"object": "list", "data": page, "first_id": first, "last_id": last}
        return json_response({**found, "has_more": len(items) > len(page)})

    async def _get(self, request: Request) -> Response:
        name, kept = await self._kept(request)
        asked = request.query_params
        if (stream := asked.get("stream", "false")) not in ("true", "false"):
            raise InvalidArgument(f"stream={shortened(stream)}: must be true or false")
        after = asked.get("starting_after", "-1")
        if after != "-1" and not (after.isascii() and after.isdecimal() and len(after) < 16):
            raise InvalidArgument(f"starting_after={shortened(after)}: must be an event's number")
        if stream == "false":
            return json_response(kept.told())
        if not kept.streamed:
            raise InvalidArgument("stream=true: this response was made without events")
        events = self._events(name, tenant_name(), int(after) + 1)
        return StreamingResponse(events, headers=STREAM_HEADERS | {"x-request-id": name})

    async def _delete(self, request: Request) -> Response:
        name, _ = await self._kept(request)
        await asyncio.wrap_future(self._store.change(name, lambda book: book.delete(name)))
        if (recording := self._store.live.get(name)) is not None:
            self._store.cancel(recording)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        name, kept = await self._kept(request)
        if (recording := self._store.live.get(name)) is not None:
            self._store.cancel(recording)
            deadline = asyncio.get_running_loop().time() + _CANCEL_S
            while kept.status == RUNNING and asyncio.get_running_loop().time() < deadline:
                await self._store.changed(name, _POLL_S)
                _, kept = await self._kept(request)
        elif kept.status == RUNNING:  # another worker's, which sees it when it writes next
            cancelled: Object = {"status": "cancelled"}
            ended = self._store.change(name, lambda book: book.end(name, cancelled))
            await asyncio.wrap_future(ended)
            _, kept = await self._kept(request)
        return json_response(kept.told())

    async def _kept(self, request: Request) -> tuple[str, Kept]:
        name = request.path_params["id"]
        return name, await asyncio.to_thread(self._store.read, name, tenant_name())

    async def _events(self, name: str, tenant: str, at: int) -> AsyncIterator[bytes]:
        """The events from number `at` on, until the last."""
        store, loop = self._store, asyncio.get_running_loop()
        told = loop.time()
        last = b""
        if at:
            last = (await asyncio.to_thread(store.events, name, at - 1)).data.partition(END)[0]
        with store.reading(name):
            while True:
                found = await asyncio.to_thread(store.events, name, at)
                if found.data:
                    at, told = at + found.number, loop.time()
                    last = found.data[:-2].rpartition(END)[2]
                    yield found.data
                if found.left:
                    continue
                if found.status != RUNNING:
                    break
                if loop.time() - told > _COMMENT_S:
                    told = loop.time()
                    yield _COMMENT
                await store.changed(name, _POLL_S)
        if found.status in ("failed", "cancelled") and not last.startswith(_LAST):
            kept = await asyncio.to_thread(store.read, name, tenant)
            yield _last_event(kept.told(), at)


def _input_item(name: str, item: Object) -> Object:
    """An item of the input as OpenAI lists it; clients may give two of them one id."""
    given = {key: value for key, value in item.items() if value is not None}
    found: Object = {"type": "message", "status": "completed", **given, "id": name}
    if isinstance(text := found.get("content"), str):
        kind = "output_text" if found.get("role") == "assistant" else "input_text"
        extra: Object = {"annotations": []} if kind == "output_text" else {}
        found["content"] = [{"type": kind, "text": text, **extra}]
    return found


def _last_event(response: Object, number: int) -> bytes:
    """The event that its worker did not come to write."""
    event: dict[str, Any] = {"type": "response.failed", "response": response}
    return named_event({**event, "sequence_number": number})
