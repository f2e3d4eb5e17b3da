"""Response of /v1/embeddings: embeds when it is sent; cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cog_triton.errors import TritonMalformedEvent, TritonUnavailable
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.generation import GenerationRequest
from cog_triton.serving.inbox import LoopInboxes
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.sequences import SequencePlan, Sequences


class EmbeddingResponse(Response):
    """Embeds the inputs, some at once, each with its own place in admission control."""

    def __init__(
        self,
        generator: TextGenerator,
        requests: Sequence[GenerationRequest],
        inboxes: LoopInboxes,
        *,
        model: str,
        at_once: int,
        as_base64: bool,
    ) -> None:
        """`at_once` is how many inputs may run together, where there are places for them."""
        super().__init__()
        self._generator = generator
        self._requests = requests
        self._inboxes = inboxes
        self._model = model
        self._at_once = at_once
        self._as_base64 = as_base64
        self._running: Sequences | None = None
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Embed and send, as an ASGI application."""
        disconnect = asyncio.ensure_future(self._cancel_on_disconnect(receive))
        try:
            await (await self._complete())(scope, receive, send)
        finally:
            disconnect.cancel()

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._running is not None:
            self._running.cancel()

    async def _complete(self) -> Response:
        try:
            embeddings = await self._embed()
        except Exception as error:  # noqa: BLE001 - answered with its code
            return error_responses.error_response(error_responses.to_coded_error(error))
        # Of many numbers, it would hold up the event loop.
        content = await asyncio.to_thread(self._content, embeddings)
        return Response(content, media_type="application/json")

    async def _embed(self) -> list[Sequence[float]]:
        found: list[Sequence[float]] = []
        while len(found) < len(self._requests):
            if self._gone:
                raise TritonUnavailable("cancelled")
            plan = SequencePlan(self._requests[len(found) :][: self._places()])
            self._running = Sequences(self._generator, plan, self._inboxes.new())
            with self._running as sequences:
                while not sequences.ended:
                    await sequences.advance()
            found += [generation.result.embedding for generation in sequences.generations]
        if not all(found):
            raise TritonMalformedEvent("the engine ended a request without an embedding")
        return found

    def _places(self) -> int:
        """How many inputs to run next: no more than would run at once, nor than have room."""
        admission = self._generator.admission
        room = admission.slots + admission.max_queue - admission.running - admission.waiting
        return int(max(1, min(self._at_once, admission.slots, room)))

    def _content(self, embeddings: list[Sequence[float]]) -> bytes:
        """The body; each embedding is written alone, so that no call holds the GIL for long."""
        items = [
            b'{"object":"embedding","index":%d,"embedding":%s}' % (place, self._written(numbers))
            for place, numbers in enumerate(embeddings)
        ]
        count = sum(len(request.engine.input_ids) for request in self._requests)
        usage = {"prompt_tokens": count, "total_tokens": count}
        tail = json.dumps({"model": self._model, "usage": usage}, separators=(",", ":")).encode()
        return b'{"object":"list","data":[%s],%s' % (b",".join(items), tail[1:])

    def _written(self, numbers: Sequence[float]) -> bytes:
        if self._as_base64:  # of little-endian float32
            return b'"%s"' % base64.b64encode(array("f", numbers).tobytes())
        return json.dumps(numbers, separators=(",", ":")).encode()
