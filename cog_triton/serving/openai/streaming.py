"""Streamed or complete response of the OpenAI API; cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.sequences import Pieces, Sequences
from cog_triton.serving.openai.shapes import Answer, Shape

# An error before this, such as E2107, sets the HTTP status; after it, the headers are sent, and
# errors are an event of the stream.
_HEADERS_AFTER_S = 1.0
_COMMENT_AFTER_S = 5.0
_COMMENT = b": the engine is being restarted\n\n"
"""Keeps proxies from closing a stream that waits for the engine's return."""
BODY_SEND = "body_send"
"""Name in a scope of the send for what follows a response's start.

It passes by the middleware, which has nothing to do there, and takes a call a message each.
"""
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Headers of event streams."""
_HEADERS = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]


class EngineResponse(ABC):
    """Response, as an ASGI application, that the engine works at while it is sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have it made and send it; cancelled when the client disconnects."""
        disconnect = asyncio.ensure_future(self._cancel_on_disconnect(receive))
        try:
            await self.send(scope, receive, send)
        finally:
            disconnect.cancel()

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    @abstractmethod
    def cancel(self) -> None:
        """End the engine's work."""

    @abstractmethod
    async def complete(self) -> Response:
        """The whole response; raises the error to answer with."""

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole response."""
        try:
            response = await self.complete()
        except Exception as error:  # noqa: BLE001 - answered with its code
            found = error_responses.to_coded_error(error)
            response = error_responses.error_response(found, path=scope["path"])
        await response(scope, receive, send)


class _BegunSend(Awaitable[None]):
    """A send that has begun outside of a task, and waits for the client; to be awaited in one."""

    def __init__(self, steps: Generator[Any, Any, None], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    @classmethod
    def begin(cls, sending: Awaitable[None]) -> _BegunSend | None:
        """Send; None if that is done, as it nearly always is."""
        steps = sending.__await__()
        try:
            return cls(steps, next(steps))
        except StopIteration:
            return None

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waits_for
        except BaseException:
            self._steps.close()
            raise
        yield from self._steps


@dataclass(slots=True)
class GenerationResponse(EngineResponse):
    """Streamed or complete `answers` of sequences, in their order."""

    sequences: Sequences
    shape: Shape
    answers: Sequence[Answer]
    streamed: bool

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.streamed:
            await self._send_stream(scope, receive, send)
        else:
            await EngineResponse.send(self, scope, receive, send)

    def cancel(self) -> None:
        self.sequences.cancel()

    async def complete(self) -> Response:
        with self.sequences as sequences:
            while not sequences.ended:
                for place, piece in await sequences.advance() or ():
                    if piece is not None:
                        self.answers[place].add(piece)
        plan, answers = sequences.plan, self.answers
        shown: list[Answer] = []  # all, or the best ones
        for first in range(0, len(answers), plan.made):
            made = answers[first : first + plan.made]
            if plan.shown < plan.made:
                made = sorted(made, key=lambda answer: -answer.mean_log_prob)
            shown += made[: plan.shown]
        results = [(each, sequences.generations[each.index].result) for each in shown]
        return error_responses.json_response(self.shape.whole(results, sequences.usage))

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        sequences, shape = self.sequences, self.shape
        headers_sent = False
        try:
            with sequences:
                pieces = await self._first_pieces()
                headers = [*_HEADERS, (b"x-request-id", shape.id.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                headers_sent = True
                send = scope.get(BODY_SEND, send)
                usage = sequences.usage._replace(output=0, reasoning=0)
                data = b"".join([shape.first(answer, usage) for answer in self.answers])
                while True:
                    data += self._events(pieces)
                    if sequences.ended:
                        break
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        data = b""
                    if sequences.interrupted:
                        pieces, data = await self._next_pieces()
                    else:
                        pieces, data = (), await self._pass_on(send)
            data += shape.done(sequences.usage)
        except Exception as error:  # noqa: BLE001 - sent with its code
            coded = error_responses.to_coded_error(error)
            if not headers_sent:
                response = error_responses.error_response(coded, path=scope["path"])
                await response(scope, receive, send)
                return
            data = shape.failure(coded)
        await send({"type": "http.response.body", "body": data})

    async def _pass_on(self, send: Send) -> bytes:
        """Send what comes, until an end, a loss of the engine, or a client that reads too slowly.

        Returns what is still to be sent.
        """
        left = b""
        sending: _BegunSend | None = None

        def arrived(pieces: Pieces) -> bool:
            nonlocal left, sending
            data = self._events(pieces)
            if self.sequences.ended or self.sequences.interrupted:
                left = data
                return False
            if data:
                sending = _BegunSend.begin(
                    send({"type": "http.response.body", "body": data, "more_body": True})
                )
            return sending is None

        await self.sequences.handle(arrived)
        if sending is not None:
            await sending
        return left

    async def _next_pieces(self) -> tuple[Pieces, bytes]:
        """The next pieces; or none and a comment, from time to time: the engine is gone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _COMMENT_AFTER_S
        while (left := deadline - loop.time()) > 0:
            pieces = await self.sequences.advance(left)
            # What is made again brings none.
            if pieces and (self._tell(pieces) or not self.sequences.interrupted):
                return pieces, b""
        return (), _COMMENT

    def _tell(self, pieces: Pieces) -> bool:
        """Whether there is text among the pieces, or an end."""
        return any(piece is not None or self.sequences.done(place) for place, piece in pieces)

    async def _first_pieces(self) -> Pieces:
        """The first pieces; none when they are not there in time for the headers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _HEADERS_AFTER_S
        while not self.sequences.ended:
            pieces = await self.sequences.advance(max(deadline - loop.time(), 0))
            if pieces is None:
                return ()
            if self._tell(pieces):
                return pieces
        return ()

    def _events(self, pieces: Pieces) -> bytes:
        data, sequences, shape = b"", self.sequences, self.shape
        for place, piece in pieces:
            answer = self.answers[place]
            if piece is not None:
                usage = sequences.usage if shape.usage_so_far else None
                data += shape.events(answer, piece, usage)
            if sequences.done(place):
                result = sequences.generations[place].result
                data += shape.closing(answer, result, sequences.usage)
        return data
