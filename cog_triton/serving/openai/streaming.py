"""One request of OpenAI's API being answered: streamed or whole, stopped when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cog_triton.serving.generate import Generation, TextGenerator, TokenLogProb
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.responses import DONE, Answer, event, usage
from cog_triton.triton.asyncio_stream import Reading
from cog_triton.triton.http_stream import HTTPStream

# An error that comes before this, such as E2107, is told by the HTTP status; a client that waits
# longer gets the head of the stream, and later errors are an event of it.
_HEAD_S = 1.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text, the log probabilities of what it was made of, and the tokens of the answer so far."""

    text: str
    log_probs: tuple[TokenLogProb, ...]
    tokens: int


class Exchange(Response):
    """Generates only once it is sent; a client that leaves ends the generation."""

    def __init__(
        self,
        generator: TextGenerator,
        generation: Generation,
        answer: Answer,
        *,
        stream: bool,
        include_usage: bool,
        usage_so_far: bool = False,
    ) -> None:
        super().__init__()
        self._generator = generator
        self._generation = generation
        self._answer = answer
        self._streamed = stream
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI has it."""
        leaving = asyncio.ensure_future(self._cancel_when_left(receive))
        reading = Reading(self._pieces(), self._connection)
        try:
            if self._streamed:
                await self._send_stream(reading, scope, receive, send)
            else:
                await (await self._whole(reading))(scope, receive, send)
        finally:
            leaving.cancel()
            if not reading.ended:
                self._generation.cancel()

    async def _cancel_when_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.cancel()

    def _connection(self) -> HTTPStream:
        assert self._generation.connection is not None
        return self._generation.connection

    def _pieces(self) -> Generator[Piece | None, None, None]:
        generation = self._generation
        generation.pauses = True
        for text in self._generator.stream(generation):
            yield Piece(text, self._taken(), generation.output_token_count) if text else None
        if rest := self._taken():
            yield Piece("", rest, generation.output_token_count)

    def _taken(self) -> tuple[TokenLogProb, ...]:
        log_probs = tuple(self._generation.log_probs)
        del self._generation.log_probs[: len(log_probs)]
        return log_probs

    async def _whole(self, reading: Reading[Piece]) -> Response:
        pieces: list[Piece] = []
        try:
            while (arrived := await reading.next()) is not None:
                pieces += arrived
        except Exception as error:  # noqa: BLE001 - answered, with its code
            return error_responses.response(error_responses.coded(error))
        text, log_probs = self._joined(pieces)
        return error_responses.json_response(self._answer.whole(text, log_probs, self._generation))

    async def _send_stream(
        self, reading: Reading[Piece], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            arrived = await reading.next(_HEAD_S)
        except Exception as error:  # noqa: BLE001 - answered, with its code
            await error_responses.response(error_responses.coded(error))(scope, receive, send)
            return
        headers = [*_HEADERS, (b"x-request-id", self._answer.id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = self._answer.opening()
        data = self._event(opening, 0) if opening else b""
        try:
            while arrived is not None:
                if arrived:
                    piece = self._answer.piece(*self._joined(arrived))
                    data += self._event(piece, arrived[-1].tokens)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                data = b""
                arrived = await reading.next()
            generation = self._generation
            data = self._event(self._answer.closing(generation), generation.output_token_count)
            if self._include_usage:
                data += event(self._answer.usage(generation))
            data += DONE
        except Exception as error:  # noqa: BLE001 - told in the stream, with its code
            data = event(error_responses.body(error_responses.coded(error)))
        await send({"type": "http.response.body", "body": data})

    def _event(self, piece: dict[str, Any], tokens: int) -> bytes:
        if not self._include_usage:
            return event(piece)
        told = usage(self._generation, tokens) if self._usage_so_far else None
        return event({**piece, "usage": told})

    def _joined(self, pieces: Sequence[Piece]) -> tuple[str, list[TokenLogProb] | None]:
        text = "".join([piece.text for piece in pieces])
        if not self._generation.return_log_probs:
            return text, None
        return text, [value for piece in pieces for value in piece.log_probs]
