"""Streamed or complete response of the OpenAI API; cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cog_triton.serving.generate import Generation
from cog_triton.serving.generation import TextPiece, TokenLogProb
from cog_triton.serving.inbox import LoopInbox
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.responses import DONE, ResponseBuilder, sse_event, usage

# An error before this, such as E2107, sets the HTTP status; after it, the headers are sent, and
# errors are an event of the stream.
_HEADERS_AFTER_S = 1.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Generates when it is sent; cancels the generation if the client disconnects."""

    def __init__(
        self,
        generation: Generation,
        inbox: LoopInbox,
        builder: ResponseBuilder,
        *,
        stream: bool,
        include_usage: bool,
        usage_so_far: bool = False,
    ) -> None:
        """`inbox` is the one of `generation`."""
        super().__init__()
        self._generation = generation
        self._inbox = inbox
        self._builder = builder
        self._streamed = stream
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, as an ASGI application."""
        disconnect = asyncio.ensure_future(self._cancel_on_disconnect(receive))
        try:
            if self._streamed:
                await self._send_stream(scope, receive, send)
            else:
                await (await self._complete_response())(scope, receive, send)
        finally:
            disconnect.cancel()

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.ticket.cancel()

    async def _complete_response(self) -> Response:
        log_probs: list[TokenLogProb] = []
        try:
            with self._generation as generation:
                while not generation.ended:
                    piece = generation.advance(await self._inbox.take() or ())
                    if piece is not None:
                        self._builder.add(piece.text)
                        log_probs += piece.log_probs
        except Exception as error:  # noqa: BLE001 - answered with its code
            return error_responses.error_response(error_responses.to_coded_error(error))
        return error_responses.json_response(
            self._builder.full_response(
                log_probs if generation.request.return_log_probs else None,
                generation,
            )
        )

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, inbox = self._generation, self._inbox
        headers_sent = False
        try:
            with generation:
                piece = await self._first_piece()
                headers = [*_HEADERS, (b"x-request-id", self._builder.id.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                headers_sent = True
                first = self._builder.first_chunk()
                data = self._event(first, 0) if first else b""
                while True:
                    if piece is not None:
                        data += self._piece_event(piece)
                    if generation.ended:
                        break
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        data = b""
                    piece = generation.advance(await inbox.take() or ())
            data += self._last_events()
        except Exception as error:  # noqa: BLE001 - sent with its code
            coded = error_responses.to_coded_error(error)
            if not headers_sent:
                await error_responses.error_response(coded)(scope, receive, send)
                return
            data = sse_event(error_responses.error_body(coded))
        await send({"type": "http.response.body", "body": data})

    async def _first_piece(self) -> TextPiece | None:
        """The first piece; None when there is none in time for the headers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _HEADERS_AFTER_S
        while not self._generation.ended:
            items = await self._inbox.take(max(deadline - loop.time(), 0))
            if items is None:
                return None
            piece = self._generation.advance(items)
            if piece is not None:
                return piece
        return None

    def _last_events(self) -> bytes:
        generation = self._generation
        chunks = [*self._builder.end_chunks(), self._builder.last_chunk(generation)]
        tokens = generation.result.output_token_count
        data = b"".join(self._event(chunk, tokens) for chunk in chunks)
        if self._include_usage:
            data += sse_event(self._builder.usage_chunk(generation))
        return data + DONE

    def _piece_event(self, piece: TextPiece) -> bytes:
        log_probs = piece.log_probs if self._generation.request.return_log_probs else None
        if log_probs is None and not self._include_usage:
            return self._builder.events(piece.text)
        chunks = self._builder.chunks(piece.text, log_probs)
        return b"".join(self._event(chunk, piece.tokens) for chunk in chunks)

    def _event(self, chunk: dict[str, Any], tokens: int) -> bytes:
        if not self._include_usage:
            return sse_event(chunk)
        counts = usage(self._generation, tokens) if self._usage_so_far else None
        return sse_event({**chunk, "usage": counts})
