"""Streamed or complete response of the OpenAI API; cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cog_triton.serving.generation import TextPiece
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.choices import ChoiceBuilder
from cog_triton.serving.openai.envelope import Envelope, sse_event, usage
from cog_triton.serving.openai.sequences import Sequences

# An error before this, such as E2107, sets the HTTP status; after it, the headers are sent, and
# errors are an event of the stream.
_HEADERS_AFTER_S = 1.0
_COMMENT_AFTER_S = 5.0
_COMMENT = b": the engine is being restarted\n\n"
"""Keeps proxies from closing a stream that waits for the engine's return."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Pieces = Sequence[tuple[int, TextPiece | None]]
"""What sequences got, by their places; see `Sequences.advance`."""


class GenerationResponse(Response):
    """Generates when it is sent; cancels all of its sequences if the client disconnects."""

    def __init__(
        self,
        sequences: Sequences,
        envelope: Envelope,
        builders: Sequence[ChoiceBuilder],
        *,
        stream: bool,
        include_usage: bool,
        usage_so_far: bool = False,
    ) -> None:
        """`builders` are those of the sequences, in their order."""
        super().__init__()
        self._sequences = sequences
        self._envelope = envelope
        self._builders = builders
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
        self._sequences.cancel()

    async def _complete_response(self) -> Response:
        builders = self._builders
        try:
            with self._sequences as sequences:
                while not sequences.ended:
                    for place, piece in await sequences.advance() or ():
                        if piece is not None:
                            builders[place].add(piece)
        except Exception as error:  # noqa: BLE001 - answered with its code
            return error_responses.error_response(error_responses.to_coded_error(error))
        tokens = self._sequences.output_tokens
        return error_responses.json_response(
            self._envelope.whole(self._choices(), self._usage(tokens))
        )

    def _choices(self) -> list[dict[str, Any]]:
        """The choices to answer: of each prompt all, or the best ones."""
        plan = self._sequences.plan
        choices: list[dict[str, Any]] = []
        for first in range(0, len(self._builders), plan.made):
            places = list(range(first, first + plan.made))
            if plan.shown < plan.made:
                places.sort(key=lambda place: -self._builders[place].mean_log_prob)
            for place in places[: plan.shown]:
                result = self._sequences.generations[place].result
                choices.append({**self._builders[place].choice(result), "index": len(choices)})
        return choices

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        sequences, builders = self._sequences, self._builders
        headers_sent = False
        try:
            with sequences:
                pieces = await self._first_pieces()
                headers = [*_HEADERS, (b"x-request-id", self._envelope.id.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                headers_sent = True
                firsts = [chunk for builder in builders for chunk in builder.first_chunks()]
                data = b"".join([self._event(chunk, 0) for chunk in firsts])
                while True:
                    data += self._events(pieces)
                    if sequences.ended:
                        break
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        data = b""
                    pieces, data = await self._next_pieces()
            if self._include_usage:
                chunk = self._envelope.chunk([])
                data += sse_event({**chunk, "usage": self._usage(sequences.output_tokens)})
            data += self._envelope.done
        except Exception as error:  # noqa: BLE001 - sent with its code
            coded = error_responses.to_coded_error(error)
            if not headers_sent:
                await error_responses.error_response(coded)(scope, receive, send)
                return
            data = self._envelope.failure(coded)
        await send({"type": "http.response.body", "body": data})

    async def _next_pieces(self) -> tuple[Pieces, bytes]:
        """The next pieces; or none and a comment, from time to time while the engine is gone."""
        timeout = _COMMENT_AFTER_S if self._sequences.interrupted else None
        pieces = await self._sequences.advance(timeout)
        return ((), _COMMENT) if pieces is None else (pieces, b"")

    async def _first_pieces(self) -> Pieces:
        """The first pieces; none when they are not there in time for the headers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _HEADERS_AFTER_S
        while not self._sequences.ended:
            pieces = await self._sequences.advance(max(deadline - loop.time(), 0))
            if pieces is None:
                return ()
            generations = self._sequences.generations
            if any(piece is not None or generations[place].ended for place, piece in pieces):
                return pieces
        return ()

    def _events(self, pieces: Pieces) -> bytes:
        data = b""
        for place, piece in pieces:
            builder = self._builders[place]
            if piece is not None:
                data += self._piece_event(builder, piece)
            generation = self._sequences.generations[place]
            if generation.ended:
                tokens = self._sequences.output_tokens
                chunks = builder.closing_chunks(generation.result)
                data += b"".join([self._event(chunk, tokens) for chunk in chunks])
        return data

    def _piece_event(self, builder: ChoiceBuilder, piece: TextPiece) -> bytes:
        if not self._include_usage:
            return builder.events(piece)
        tokens = self._sequences.output_tokens
        return b"".join([self._event(chunk, tokens) for chunk in builder.chunks(piece)])

    def _event(self, chunk: dict[str, Any], tokens: int) -> bytes:
        if not self._include_usage:
            return self._envelope.event(chunk)
        return sse_event({**chunk, "usage": self._usage(tokens) if self._usage_so_far else None})

    def _usage(self, tokens: int) -> dict[str, int]:
        return usage(self._sequences.prompt_tokens, tokens)
