"""Streamed or complete response of the OpenAI API; cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cog_triton.serving.generate import Generation, TextGenerator, TokenLogProb
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.responses import DONE, ResponseBuilder, sse_event, usage
from cog_triton.triton.asyncio_stream import AsyncStreamReader
from cog_triton.triton.http_stream import HTTPStream

# An error before this, such as E2107, sets the HTTP status; after it, the headers are sent, and
# errors are an event of the stream.
_HEADERS_AFTER_S = 1.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class TextChunk:
    """New text, the log probabilities of its tokens, and the number of tokens so far."""

    text: str
    log_probs: tuple[TokenLogProb, ...]
    tokens: int


class GenerationResponse(Response):
    """Generates when it is sent; cancels the generation if the client disconnects."""

    def __init__(
        self,
        generator: TextGenerator,
        generation: Generation,
        builder: ResponseBuilder,
        *,
        stream: bool,
        include_usage: bool,
        usage_so_far: bool = False,
    ) -> None:
        super().__init__()
        self._generator = generator
        self._generation = generation
        self._builder = builder
        self._streamed = stream
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, as an ASGI application."""
        disconnect = asyncio.ensure_future(self._cancel_on_disconnect(receive))
        reader = AsyncStreamReader(self._chunks(), self._connection)
        try:
            if self._streamed:
                await self._send_stream(reader, scope, receive, send)
            else:
                await (await self._complete_response(reader))(scope, receive, send)
        finally:
            disconnect.cancel()
            if not reader.ended:
                self._generation.cancel()

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.cancel()

    def _connection(self) -> HTTPStream:
        assert self._generation.connection is not None
        return self._generation.connection

    def _chunks(self) -> Generator[TextChunk | None, None, None]:
        generation = self._generation
        generation.pauses = True
        for text in self._generator.stream(generation):
            yield (
                TextChunk(text, self._take_log_probs(), generation.output_token_count)
                if text
                else None
            )
        if rest := self._take_log_probs():
            yield TextChunk("", rest, generation.output_token_count)

    def _take_log_probs(self) -> tuple[TokenLogProb, ...]:
        log_probs = tuple(self._generation.log_probs)
        del self._generation.log_probs[: len(log_probs)]
        return log_probs

    async def _complete_response(self, reader: AsyncStreamReader[TextChunk]) -> Response:
        chunks: list[TextChunk] = []
        try:
            while (arrived := await reader.read()) is not None:
                chunks += arrived
        except Exception as error:  # noqa: BLE001 - answered with its code
            return error_responses.error_response(error_responses.to_coded_error(error))
        text, log_probs = self._merge(chunks)
        return error_responses.json_response(
            self._builder.full_response(text, log_probs, self._generation)
        )

    async def _send_stream(
        self, reader: AsyncStreamReader[TextChunk], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            arrived = await reader.read(_HEADERS_AFTER_S)
        except Exception as error:  # noqa: BLE001 - answered with its code
            await error_responses.error_response(error_responses.to_coded_error(error))(
                scope, receive, send
            )
            return
        headers = [*_HEADERS, (b"x-request-id", self._builder.id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        first = self._builder.first_chunk()
        data = self._event(first, 0) if first else b""
        try:
            while arrived is not None:
                if arrived:
                    chunk = self._builder.chunk(*self._merge(arrived))
                    data += self._event(chunk, arrived[-1].tokens)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                data = b""
                arrived = await reader.read()
            generation = self._generation
            data = self._event(self._builder.last_chunk(generation), generation.output_token_count)
            if self._include_usage:
                data += sse_event(self._builder.usage_chunk(generation))
            data += DONE
        except Exception as error:  # noqa: BLE001 - sent in the stream with its code
            data = sse_event(error_responses.error_body(error_responses.to_coded_error(error)))
        await send({"type": "http.response.body", "body": data})

    def _event(self, chunk: dict[str, Any], tokens: int) -> bytes:
        if not self._include_usage:
            return sse_event(chunk)
        counts = usage(self._generation, tokens) if self._usage_so_far else None
        return sse_event({**chunk, "usage": counts})

    def _merge(self, chunks: Sequence[TextChunk]) -> tuple[str, list[TokenLogProb] | None]:
        text = "".join([chunk.text for chunk in chunks])
        if not self._generation.return_log_probs:
            return text, None
        return text, [value for chunk in chunks for value in chunk.log_probs]
