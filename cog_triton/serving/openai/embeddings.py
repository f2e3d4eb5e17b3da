"""POST /v1/embeddings: inputs as text or token ids, each embedded as a request of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    PromptRequired,
    TritonMalformedEvent,
    TritonUnavailable,
)
from cog_triton.serving.generation import GenerationRequest
from cog_triton.serving.openai.request_body import check_ids
from cog_triton.serving.openai.requests import Exact, Prompts, listed, parse_known, without_fraction
from cog_triton.serving.openai.sequences import SequencePlan, Sequences
from cog_triton.serving.openai.served_models import ServedAPI
from cog_triton.serving.openai.streaming import EngineResponse
from cog_triton.system.log_format import request_id
from cog_triton.text.chat import require_unicode
from cog_triton.text.sampling import SamplingParams

_log = logging.getLogger(__name__)

MAX_INPUTS = 2048
"""Inputs of one request, as OpenAI has it."""

# Fields of vLLM's server that would change the numbers -> values that do not, and why others.
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "add_special_tokens": ((True,), "prompts have those of the model"),
    "embed_dtype": (("float32",), "numbers are float32"),
    "endianness": (("native", "little"), "numbers are little-endian"),
    "messages": (([],), "send input"),
    "normalize": ((True,), "the model's own is used"),
    "truncate_prompt_tokens": ((), "prompts are not shortened"),
    "use_activation": ((True,), "the model's own is used"),
}


class EmbeddingsRequest(Exact):
    """POST /v1/embeddings: each input is a text, or token ids."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None

    _whole = field_validator("dimensions", mode="before")(without_fraction)


class EmbeddingRoutes:
    """The endpoint, for one model and its adapters; refused by name where the model has none."""

    def __init__(self, api: ServedAPI) -> None:
        self._api = api

    async def embed(self, request: Request) -> EngineResponse:
        """POST /v1/embeddings."""
        name = f"embd-{secrets.token_hex(16)}"
        request_id.set(name)
        return await self._api.planned(request, lambda body: self._plan(body, name))

    def _plan(self, body: Any, name: str) -> EmbeddingResponse:
        models = self._api.models
        model = body.get("model") if isinstance(body, dict) else None
        adapter = models.adapter(model) if isinstance(model, str) else None
        if not self._api.abilities.embeddings:
            raise InvalidArgument(
                f"model={models.base!r}: makes no embeddings: it is served to generate text"
            )
        request = parse_known(EmbeddingsRequest, body, _NEUTRAL)
        inputs = listed(request.input)
        if len(inputs) > MAX_INPUTS:
            raise InvalidArgument(f"input: has {len(inputs)}; {MAX_INPUTS} at most")
        requests = [
            GenerationRequest(
                engine=EngineRequest(
                    input_ids=ids,
                    sampling=SamplingParams(max_tokens=1),
                    embeds=True,
                    dimensions=request.dimensions,
                    adapter=adapter,
                ),
                id=name,
                endpoint="embeddings",
            )
            for ids in self._token_ids(inputs)
        ]
        as_base64 = request.encoding_format == "base64"
        return EmbeddingResponse(self._api, requests, request.model, as_base64=as_base64)

    def _token_ids(self, inputs: list[str | list[int]]) -> Iterator[list[int]]:
        for place, given in enumerate(inputs):
            where = f"input[{place}]" if len(inputs) > 1 else "input"
            try:
                yield self._encoded(where, given)
            except CogTritonError as error:
                if len(inputs) == 1 or error.detail.startswith(where):
                    raise
                raise type(error)(f"{where}: {error.detail}") from None

    def _encoded(self, where: str, given: str | list[int]) -> list[int]:
        if not given:
            raise PromptRequired(f"{where}: blank")
        generator = self._api.generator
        if isinstance(given, str):
            ids = generator.encode(require_unicode(where, given, InvalidArgument))
            generator.check_length(len(ids))
            return ids
        generator.check_length(len(given))
        check_ids(where, given, generator.tokenizer.vocab_size)
        return given


@dataclass(slots=True)
class EmbeddingResponse(EngineResponse):
    """Embeddings of the inputs, of which some run at once, each with its own place in admission."""

    api: ServedAPI
    requests: Sequence[GenerationRequest]
    model: str
    as_base64: bool
    _running: Sequences | None = None
    _gone: bool = False

    def cancel(self) -> None:
        self._gone = True
        if self._running is not None:
            self._running.cancel()

    async def complete(self) -> Response:
        embeddings = await self._embed()
        # Of many numbers, it would hold up the event loop.
        content = await asyncio.to_thread(self._content, embeddings)
        return Response(content, media_type="application/json")

    async def _embed(self) -> list[Sequence[float]]:
        found: list[Sequence[float]] = []
        while len(found) < len(self.requests):
            if self._gone:
                raise TritonUnavailable("cancelled")
            plan = SequencePlan(self.requests[len(found) :][: self._places()])
            self._running = Sequences(self.api.generator, plan)
            with self._running as sequences:
                while not sequences.ended:
                    await sequences.advance()
            found += [generation.result.embedding for generation in sequences.generations]
        if not all(found):
            raise TritonMalformedEvent("the engine ended a request without an embedding")
        return found

    def _places(self) -> int:
        """How many inputs to run next: no more than would run at once, nor than have room."""
        admission, at_once = self.api.generator.admission, self.api.settings.max_sequences
        room = admission.slots + admission.max_queue - admission.running - admission.waiting
        return int(max(1, min(at_once, admission.slots, room)))

    def _content(self, embeddings: list[Sequence[float]]) -> bytes:
        """The body; each embedding is written alone, so that no call holds the GIL for long."""
        items = [
            b'{"object":"embedding","index":%d,"embedding":%s}' % (place, self._written(numbers))
            for place, numbers in enumerate(embeddings)
        ]
        count = sum(len(request.engine.input_ids) for request in self.requests)
        usage = {"prompt_tokens": count, "total_tokens": count}
        tail = json.dumps({"model": self.model, "usage": usage}, separators=(",", ":")).encode()
        return b'{"object":"list","data":[%s],%s' % (b",".join(items), tail[1:])

    def _written(self, numbers: Sequence[float]) -> bytes:
        if self.as_base64:  # of little-endian float32
            return b'"%s"' % base64.b64encode(array("f", numbers).tobytes())
        return json.dumps(numbers, separators=(",", ":")).encode()
